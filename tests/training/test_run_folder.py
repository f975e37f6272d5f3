import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.ranks import HOST, run_ranks

from mingpt.base.errors import NodeRefused, PeersMissing, UserError
from mingpt.config.cli import build
from mingpt.distributed import DistributedContext, Place
from mingpt.training import run_folder
from mingpt.training.run_folder import (
    RunFolder,
    check_is_ours,
    check_same_settings,
    make_run_dir,
    open_run_folder,
    refuse_where_it_fails,
    try_disks,
)


def fail(monkeypatch: pytest.MonkeyPatch, method: str, code: int) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise OSError(code, "broken")

    monkeypatch.setattr(Path, method, raise_error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_no_job_whose_folder_is_there(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    fail(monkeypatch, "open", code)
    make_run_dir(run_dir)


@pytest.mark.parametrize(
    ("method", "code"),
    [("mkdir", errno.ENOSPC), ("mkdir", errno.EACCES), ("open", errno.EROFS), ("open", errno.EIO)],
)
def test_a_folder_that_cannot_be_made_or_written_is_refused(
    method: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, method, code)
    with pytest.raises(UserError, match=r"run_dir .*/run cannot be written to: broken"):
        make_run_dir(tmp_path / "run")


@pytest.mark.parametrize("setting", ["run_dir", "snapshot.path", "data.path"])
def test_a_disk_that_hangs_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.exists
    monkeypatch.setattr(run_folder, "DISK_S", 0.1)
    monkeypatch.setattr(
        "os.path.exists", lambda path: threading.Event().wait() if path == "/hangs" else exists(path)
    )
    with pytest.raises(UserError, match=r"^the disk of /hangs does not answer within 0\.1 s: look at its"):
        try_disks(build({setting: "/hangs"}))


@pytest.mark.parametrize("name", run_folder.REPLACED_FILES)
def test_a_folder_with_a_users_file_that_a_run_would_replace_is_refused(name: str, tmp_path: Path) -> None:
    """The first line of run.json shows that there is a run, also if the rest is damaged.

    A run that starts on a full disk leaves an empty metrics.jsonl, and no run.json.
    """
    os.mkfifo(tmp_path / name)  # its size is 0, too, and to open it would block
    with pytest.raises(UserError, match=name):
        check_is_ours(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    check_is_ours(tmp_path)
    (tmp_path / name).write_text('{"id": "mine"}')
    with pytest.raises(
        UserError, match=f"^run_dir {tmp_path} holds {name}, which a run would replace, and no"
    ):
        check_is_ours(tmp_path)
    (tmp_path / "run.json").write_text(f'{{\n "id": "{32 * "0"}",\n')
    check_is_ours(tmp_path)


def test_what_is_in_the_way_of_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, kind in (("file", "not a"), ("link", "a link to nowhere, which is not a")):
        for path in (tmp_path / name, tmp_path / name / "run"):
            with pytest.raises(UserError, match=f"written to: {tmp_path}/{name} is {kind} folder"):
                make_run_dir(path)


def folders(tmp_path: Path, names: str, **settings: str) -> list[Any]:
    """The run folders that ranks find whose nodes see these folders."""

    def work(context: DistributedContext) -> RunFolder:
        given = {key: str(tmp_path / names[context.rank] / value) for key, value in settings.items()}
        config = build({"run_dir": str(tmp_path / names[context.rank] / "run"), **given})
        return open_run_folder(config, context)

    return run_ranks(len(names), work)


def test_the_lowest_rank_that_sees_a_folder_keeps_it(tmp_path: Path) -> None:
    shared = folders(tmp_path, "aaa")
    assert [folder.is_kept for folder in shared] == [True, False, False]
    assert all(folder.is_shared for folder in shared)
    apart = folders(tmp_path, "abb")
    assert [folder.is_kept for folder in apart] == [True, True, False]
    assert [folder.keeps_snapshots for folder in apart] == [True, True, False]
    assert [folder.snapshot_writers for folder in shared + apart] == [[0]] * 3 + [[0, 1]] * 3
    assert not any(folder.is_shared for folder in apart)
    assert not list(tmp_path.glob("*/run/probe-*"))


def test_snapshots_may_be_shared_where_run_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    found = folders(tmp_path, "abc", **{"snapshot.path": "../all"})
    assert [folder.is_kept for folder in found] == [True, True, True]
    assert [folder.keeps_snapshots for folder in found] == [True, False, False]
    assert [folder.snapshot_writers for folder in found] == [[0]] * 3


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"seed": 2}, "seed: 1337 -> 2"),
        ({"snapshot.path": "/scratch"}, "snapshot.path: null -> a folder"),
        ({"trainer.eval_only": True}, "trainer.eval_only: False -> True"),
    ],
)
def test_workers_that_were_started_with_different_settings_are_refused(
    there: dict[str, Any], named: str
) -> None:
    def work(context: DistributedContext) -> None:
        check_same_settings(build(there if context.rank == 1 else {}), context)

    for error in run_ranks(2, work):
        assert isinstance(error, UserError) and named in str(error) and HOST in str(error)
    assert run_ranks(2, lambda context: check_same_settings(build({}), context)) == [None, None]


def test_nodes_with_different_code_are_told_apart_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = threading.local()
    monkeypatch.setattr("mingpt.training.run_folder.find_program", lambda: programs.own)

    def work(context: DistributedContext) -> None:
        context.places = [Place(rank, 0, f"node-{rank}") for rank in range(3)]
        programs.own = "code b" if context.rank == 1 else "code a"
        check_same_settings(build({}), context)

    assert run_ranks(3, work) == [None, None, None]
    (line,) = caplog.messages
    assert "may compute different bits: {'node-0': 'code a', 'node-1': 'code b', 'node-2': 'code a'}" in line


@pytest.mark.parametrize(
    ("bad_ranks", "round", "expected"),
    [
        ({1}, None, [UserError, UserError]),
        ({1}, 1, [UserError, UserError]),
        ({1}, 2, [PeersMissing, NodeRefused]),
        ({0, 1}, 2, [UserError, UserError]),
        (set(), 2, [type(None), type(None)]),
    ],
)
def test_a_job_that_has_begun_goes_on_without_a_node_whose_disk_fails(
    bad_ranks: set[int], round: int | None, expected: list[type]
) -> None:
    def work(context: DistributedContext) -> None:
        def use_disk() -> None:
            if context.rank in bad_ranks:
                error = UserError("run_dir cannot be written to")
                error.may_pass = True
                raise error

        refuse_where_it_fails(context, use_disk)

    results = run_ranks(2, work, round)
    assert [type(result) for result in results] == expected
    assert all(result.may_pass for result in results if type(result) is UserError)
