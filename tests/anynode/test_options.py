"""The options of `python -m anynode` and launch/elastic.sh, and what torchrun gets for them."""

import signal
from pathlib import Path

import pytest

from anynode.command import run_node, torchrun_options

GOOD = ["--nnodes", "2:3", "--nproc", "4", "--rdzv", "n1:29400,n2:29400", "--local_addr", "127.0.0.1"]


def test_the_options_become_a_torchrun_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    variables, options, script = torchrun_options([*GOOD, "--", "-m", "mingpt", "doctor", "--", "a=b c"])
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    assert script == ["-m", "mingpt", "doctor", "--", "a=b c"]
    for option in ("--nnodes=2:3", "--nproc_per_node=4", "--rdzv_backend=anynode", "--rdzv_id=anynode"):
        assert option in options
    assert "--rdzv_endpoint=n1:29400,n2:29400" in options and "--local_addr=127.0.0.1" in options


@pytest.mark.parametrize(
    ("handler", "options"), [(signal.SIG_IGN, ["TERM,SIGINT,SIGQUIT"]), (signal.SIG_DFL, [])]
)
def test_an_ignored_hangup_stays_ignored(handler: signal.Handlers, options: list[str]) -> None:
    """By default torchrun handles SIGHUP also under nohup, and ends."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        _, command, _ = torchrun_options([*GOOD, "--", "train.py"])
    finally:
        signal.signal(signal.SIGHUP, before)
    name = "--signals-to-handle=SIG"
    assert [word.removeprefix(name) for word in command if word.startswith(name)] == options


def test_the_torchrun_command_is_shown_without_what_may_be_a_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr("torch.distributed.run.main", started.extend)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "set")
    run_node([*GOOD, "--", "train.py", "snapshot.path=sftp://me:secret@host/run"])
    assert started[-2:] == ["train.py", "snapshot.path=sftp://me:secret@host/run"]
    said = capsys.readouterr().err
    assert said.startswith("torchrun --nnodes=2:3 ") and said.endswith(" train.py ...\n")


def test_what_the_user_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    words = ["--nnodes=2", "--nproc=auto", "--rdzv=a:1,b:2", "--local_addr=localhost", "--rdzv_id=7"]
    variables, command, _ = torchrun_options([*words, "--", "train.py"])
    assert "GLOO_SOCKET_IFNAME" not in variables and "OMP_NUM_THREADS" not in variables
    assert {"--nnodes=2:2", "--nproc_per_node=auto", "--rdzv_endpoint=a:1,b:2", "--rdzv_id=7"} <= set(command)
    assert "--local_addr=127.0.0.1" in command  # torch would resolve a name on every node anew


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--nnodes": "3:2"}, "--nnodes: must be MIN:MAX"),
        ({"--nnodes": "0:2"}, "--nnodes: must be MIN:MAX"),
        ({"--nnodes": "many"}, "got 'many'"),
        ({"--nproc": "0"}, "--nproc: must be a number"),
        ({"--nproc": "2.5"}, "got '2.5'"),
        ({"--rdzv": "somewhere"}, "--rdzv: must be HOST:PORT"),
        ({"--rdzv": "/dev/null/meet"}, "cannot be created as a folder: Not a directory"),
        ({"--rdzv": "/dev/null"}, "cannot be created as a folder: File exists"),
        ({"--local_addr": "203.0.113.9"}, "this host, which has 127.0.0.1 (lo)"),
        ({"--local_addr": "no.such.host.invalid"}, "does not resolve"),
        ({"--local_addr": "a..b"}, "does not resolve"),
        ({"--local_addr": None}, "--local_addr"),
        ({"--rdzv_id": ""}, "--rdzv_id: must be a name"),
        ({"--more": "1"}, "--more"),
        ({"--rdzv_id": "a/b"}, "without a slash; got 'a/b'"),
        ({"--rdzv_id": ".."}, "got '..'"),
        ({"--max_restarts": "-1"}, "must be a number from 0"),
        ({"--": "nosuch.py"}, "that is there; got ['nosuch.py']"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    changes: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | changes
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    with pytest.raises(SystemExit, match="2"):
        torchrun_options([*words, "--", "train.py"])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_the_folder_to_meet_is_made_for_this_user_alone(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "meet"
    _, command, _ = torchrun_options([*GOOD, f"--rdzv={place}", "--", "train.py"])
    assert f"--rdzv_endpoint={place}" in command
    assert place.stat().st_mode & 0o777 == 0o700
