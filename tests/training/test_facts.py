"""What a rank finds out when a generation starts; ranks are threads, each on a node of its own."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.forks import SingleProcess
from support.jobs import SMALL
from support.ranks import results_of_threads

from mingpt.config.cli import build
from mingpt.distributed import DistributedContext
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
    sites, found = gather(tmp_path, nodes, **settings)
    assert [one.keeper for one in found] == keepers
    assert [one.snapshot_keeper for one in found] == snapshot_keepers
    keeps = [keeper == rank for rank, keeper in enumerate(keepers)]
    assert [one.is_kept for one in sites] == [bool(one.claim.number) for one in sites] == keeps
    keeps = [keeper == rank for rank, keeper in enumerate(snapshot_keepers)]
    assert [one.keeps_snapshots for one in sites] == keeps


def test_a_node_takes_over_the_records_of_another_and_goes_on_if_it_cannot_write_them(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "run.json").write_text("{}")
    site(there).write_history(site(here).read_history())  # there is no such folder
    there.mkdir()
    site(there).write_history(site(here).read_history())
    assert site(there).read_history() == site(here).read_history()
    assert (there / "run.json").read_text() == "{}"
