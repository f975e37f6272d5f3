import errno
import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import HOST, run_ranks

from mingpt.cli import build
from mingpt.distributed import DistributedContext
from mingpt.errors import NodeRefused, PeersMissing, UserError
from mingpt.jobs import read_metric
from mingpt.run_folder import RunFolder, agree_on_run_id, make_run_dir, open_run_folder, share_history


def fail(monkeypatch: pytest.MonkeyPatch, method: str, code: int) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise OSError(code, "broken")

    monkeypatch.setattr(Path, method, raise_error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_refuses_no_job_whose_folder_is_there(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    fail(monkeypatch, "open", code)
    make_run_dir(run_dir)


@pytest.mark.parametrize(
    ("method", "code"), [("mkdir", errno.ENOSPC), ("mkdir", errno.EACCES), ("open", errno.EROFS)]
)
def test_a_folder_that_cannot_be_made_or_written_is_refused(
    method: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, method, code)
    with pytest.raises(UserError, match=r"run_dir .*/run cannot be written to: broken"):
        make_run_dir(tmp_path / "run")


def folders(tmp_path: Path, names: str, **settings: str) -> list[Any]:
    """What ranks on nodes of their own find that see these folders."""

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
    assert not any(folder.is_shared for folder in apart)
    assert not list(tmp_path.glob("*/run/probe-*"))


def test_snapshots_may_be_shared_where_run_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    found = folders(tmp_path, "abc", **{"snapshot.path": "../all"})
    assert [folder.is_kept for folder in found] == [True, True, True]
    assert [folder.keeps_snapshots for folder in found] == [True, False, False]


def write_run(path: Path, run_id: str, generations: int = 1, last_step: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    entry = {"end": "running", "from_step": 0, "to_step": last_step, "restart": False, "began": 0, "seen": 0}
    content = {"id": run_id, "generations": [entry] * generations, "changes": []}
    (path / "run.json").write_text(json.dumps(content))
    records = [json.dumps({"step": step, "train/loss": generations + step}) for step in range(last_step + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{record}\n" for record in records))


def agree(tmp_path: Path, started: tuple[bool, ...]) -> list[Any]:
    """On nodes with run folders 0, 1, ...; those that are marked had a part in an earlier generation."""

    def work(context: DistributedContext) -> str:
        folder = RunFolder(tmp_path / str(context.rank), True, True, False)
        return agree_on_run_id(context, folder, started[context.rank])

    return run_ranks(len(started), work)


def test_nodes_without_a_run_take_part_in_that_of_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "1", "abc")
    assert agree(tmp_path, (False, True, False)) == ["abc"] * 3


def test_nodes_that_hold_different_runs_are_refused_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "abc")
    write_run(tmp_path / "1", "def")
    for error in agree(tmp_path, (False, False)):
        assert type(error) is UserError
        assert f"run abc on {HOST}; run def on {HOST}" in str(error)


def test_a_node_with_another_run_is_refused_by_a_job_that_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "another")
    write_run(tmp_path / "2", "abc")
    errors = agree(tmp_path, (False, True, True))
    assert [type(error) for error in errors] == [NodeRefused, PeersMissing, PeersMissing]


def share(tmp_path: Path, nodes: int, step: int, log_every: int = 1) -> None:
    def work(context: DistributedContext) -> None:
        folder = RunFolder(tmp_path / str(context.rank), True, True, False)
        share_history(context, folder, step, log_every)

    assert run_ranks(nodes, work) == [None] * nodes


def generations(path: Path) -> int:
    return len(json.loads((path / "run.json").read_text())["generations"])


def test_a_node_that_joins_is_given_the_history(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    write_run(tmp_path / "1", "abc", generations=2, last_step=7)
    share(tmp_path, 2, step=5)
    assert generations(tmp_path / "0") == 2
    assert read_metric(tmp_path / "0") == read_metric(tmp_path / "1")
    assert len(read_metric(tmp_path / "0")) == 8


def test_old_records_of_a_node_that_comes_back_are_not_preferred(tmp_path: Path) -> None:
    """It died at step 9; the others went on from 5 and are at 6."""
    write_run(tmp_path / "0", "abc", generations=1, last_step=9)
    write_run(tmp_path / "1", "abc", generations=2, last_step=6)
    share(tmp_path, 2, step=6)
    assert generations(tmp_path / "0") == 2
    assert read_metric(tmp_path / "0") == read_metric(tmp_path / "1")


def test_of_two_parts_the_one_that_reached_the_snapshot_tells_the_history(tmp_path: Path) -> None:
    """The other part had more generations and did not come as far. Not every step has a record."""
    write_run(tmp_path / "0", "abc", generations=5, last_step=9)
    write_run(tmp_path / "1", "abc", generations=2, last_step=20)
    share(tmp_path, 2, step=22, log_every=10)
    assert generations(tmp_path / "0") == 2


def test_no_history_is_no_error(tmp_path: Path) -> None:
    share(tmp_path, 2, step=0)
