"""What a rank finds out when a generation starts; ranks are threads, each on a node of its own."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.ranks import results_of_threads
from support.runs import make_run
from support.single_process import SingleProcess
from support.small_jobs import SMALL
from support.snapshots import make_manifest

from mingpt.base.errors import CorruptSnapshot
from mingpt.config import to_dict
from mingpt.config.cli import build
from mingpt.data import TextData
from mingpt.distributed import DistributedContext
from mingpt.report.history import RunHistory
from mingpt.training import facts
from mingpt.training.facts import Site
from mingpt.training.plan import Fault, StartFacts

TEXT = "To be, or not to be, that is the question.\n" * 40


def site(run_dir: Path, context: DistributedContext | None = None, **settings: Any) -> Site:
    return Site(build(SMALL | {"run_dir": str(run_dir), **settings}), context or SingleProcess())


@pytest.mark.parametrize(
    ("method", "code", "is_there", "faults"),
    [
        ("open", errno.ENOSPC, True, []),  # each file that cannot be written is reported later
        ("open", errno.EDQUOT, True, []),
        ("open", errno.EROFS, True, [False]),
        ("open", errno.EIO, True, [True]),
        ("mkdir", errno.ENOSPC, False, [True]),
        ("mkdir", errno.EACCES, False, [False]),
    ],
)
def test_a_run_folder_that_cannot_be_made_or_written_is_a_fault_that_may_pass_or_not(
    method: str,
    code: int,
    is_there: bool,
    faults: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path if is_there else tmp_path / "run"
    monkeypatch.setattr(Path, method, Mock(side_effect=OSError(code, "broken")))
    values = {"run_dir": run_dir, "reason": "broken"}
    assert site(run_dir).make_run_dir() == [Fault("not writable", values, may_pass) for may_pass in faults]


@pytest.mark.parametrize("setting", ["run_dir", "snapshot.path", "data.path"])
def test_a_disk_that_hangs_is_a_fault(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.exists
    monkeypatch.setattr(facts, "DISK_S", 0.1)
    monkeypatch.setattr(
        "os.path.exists", lambda path: threading.Event().wait() if path == "/hangs" else exists(path)
    )
    found = Site(build(SMALL | {setting: "/hangs"}), SingleProcess()).try_disks()
    assert found == [Fault("disk", {"place": "/hangs", "limit_s": 0.1}, may_pass=True)]


@pytest.mark.parametrize("name", facts.REPLACED_FILES)
def test_a_users_file_that_a_run_would_replace_is_a_fault(name: str, tmp_path: Path) -> None:
    """The first line of run.json shows that there is a run, also if the rest is damaged.

    A run that starts on a full disk leaves an empty metrics.jsonl, and no run.json.
    """
    os.mkfifo(tmp_path / name)  # its size is 0, too, and to open it would block
    assert site(tmp_path).check_is_ours()
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    assert site(tmp_path).check_is_ours() == []
    (tmp_path / name).write_text('{"id": "mine"}')
    assert site(tmp_path).check_is_ours() == [Fault("not ours", {"run_dir": tmp_path, "names": name})]
    (tmp_path / "run.json").write_text(f'{{\n "id": "{32 * "0"}",\n')
    assert site(tmp_path).check_is_ours() == []


def test_what_is_in_the_way_of_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (fault,) = site(tmp_path / "link" / "run").make_run_dir()
    assert fault.values["reason"] == f"{tmp_path}/link is a link to nowhere, which is not a folder"


def gather(tmp_path: Path, names: str, **settings: str) -> tuple[list[Site], list[StartFacts]]:
    """The facts of nodes that see these folders; paths in `settings` are relative to a node's folder."""
    (tmp_path / "play.txt").write_text(TEXT)

    def work(context: DistributedContext) -> tuple[Site, StartFacts]:
        exits: Any = SimpleNamespace(on_job_end=lambda release: None)
        context.exit, context.rendezvous = exits, None
        node = tmp_path / names[context.rank]
        given = {key: str(node / value) for key, value in settings.items()}
        paths = {"data.path": str(tmp_path / "play.txt"), "snapshot.memory_path": str(node)}
        own = site(node / "run", context, **paths | given)
        arrivals = context.gather_on_all(own.arrive)
        found = context.gather_on_all(lambda: own.look(arrivals))
        own.remove_probes()
        return own, found[context.rank]

    sites, found = zip(*results_of_threads(len(names), work), strict=True)
    assert not list(tmp_path.glob("*/**/probe-*"))
    return list(sites), list(found)


@pytest.mark.parametrize(
    ("nodes", "settings", "keepers", "snapshot_keepers"),
    [
        ("aaa", {}, [0, 0, 0], [0, 0, 0]),
        ("abb", {}, [0, 1, 1], [0, 1, 1]),
        ("abc", {"snapshot.path": "../all"}, [0, 1, 2], [0, 0, 0]),
    ],
    ids=["a shared folder", "two folders", "shared snapshots"],
)
def test_the_lowest_rank_that_sees_a_folder_keeps_it(
    nodes: str, settings: dict[str, str], keepers: list[int], snapshot_keepers: list[int], tmp_path: Path
) -> None:
    """A rank that keeps the run folder claims it, and writes the run's records there."""
    sites, found = gather(tmp_path, nodes, **settings)
    assert [one.keeper for one in found] == keepers
    assert [one.snapshot_keeper for one in found] == snapshot_keepers
    keeps = [keeper == rank for rank, keeper in enumerate(keepers)]
    assert [one.is_kept for one in sites] == [bool(one.claim.number) for one in sites] == keeps
    keeps = [keeper == rank for rank, keeper in enumerate(snapshot_keepers)]
    assert [one.keeps_snapshots for one in sites] == keeps


def test_a_job_that_has_begun_is_known_by_run_json_if_the_store_is_lost(tmp_path: Path) -> None:
    """All generations have one agent, this process. The first two fail before they pass the checks."""
    for _ in range(2):
        (own,), (found,) = gather(tmp_path, "a")
        assert not found.records.of_this_job
    RunHistory(own.path, 32 * "0", {}).start_generation(make_run(own.path, job=own.claim.holder.job))
    _, (found,) = gather(tmp_path, "a")
    assert found.records.of_this_job and not found.was_restarted


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (30, {}, "lacks the tokenizer of the text"),
        (30, {"tokenizer": {"kind": "char", "vocab_size": 9}, "windows": 2**63 - 1}, "no run reads 92"),
        (31, {}, r"past its own trainer\.max_steps"),
    ],
)
def test_what_no_run_has_written_of_this_text_is_damage(
    step: int, change: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these the run could not go on; the snapshot before may be right."""
    monkeypatch.setattr(facts, "check_model", lambda *_: None)
    own = site(tmp_path)
    own.data = TextData(TEXT.encode(), own.config.data)
    about = {"path": "x", "sha256": own.data.fingerprint}
    manifest = make_manifest(step, config=to_dict(own.config), data=about, **change)
    with pytest.raises(CorruptSnapshot, match=expected):
        own.check(manifest, {}, None)


def test_a_node_that_cannot_take_the_records_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise its run.json would claim records that the node lacks."""
    own = site(tmp_path)
    (tmp_path / "run.json").write_text("its own")
    taken = own.read_history()
    assert taken == {"metrics.jsonl": b"", "run.json": b"its own"}, "a run that died at once has no records"
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(facts, "write_atomic", full)
    own.write_history({"metrics.jsonl": b"more", "run.json": b"another's"})
    assert (tmp_path / "run.json").read_text() == "its own" and "its records have a gap" in caplog.text
