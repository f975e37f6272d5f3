import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs import read_metric
from support.ranks import HOST, run_ranks

from mingpt.base.errors import NodeRefused, PeersMissing, UserError
from mingpt.distributed import DistributedContext
from mingpt.training.run_folder import NodeRecords, RunFolder, choose_run, read_node_records, share_history


def write_run(path: Path, run_id: str, generations: int = 1, last_step: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    entry = {"end": "running", "from_step": 0, "to_step": last_step, "restart": False, "began": 0, "seen": 0}
    content = {"id": run_id, "generations": [entry] * generations, "changes": []}
    (path / "run.json").write_text(json.dumps(content))
    records = [json.dumps({"step": step, "train/loss": generations + step}) for step in range(last_step + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{record}\n" for record in records))


def agree(tmp_path: Path, started: tuple[bool, ...]) -> list[Any]:
    """Let nodes with run folders 0, 1, ... agree; `started` marks those of an earlier generation."""

    def work(context: DistributedContext) -> str | None:
        folder = RunFolder(tmp_path / str(context.rank), True, True, False)
        own = NodeRecords(started[context.rank], *read_node_records(folder.path, "job")[1:])
        return choose_run(context, tmp_path, context.all_gather_object(own))

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


@pytest.mark.parametrize(
    ("runs", "started", "expected"),
    [
        ({0: ("another", 0), 2: ("abc", 0)}, (False, True, True), [NodeRefused, PeersMissing, PeersMissing]),
        ({0: ("abc", 5), 1: ("def", 7)}, (True, True), [NodeRefused, PeersMissing]),
    ],
    ids=["a node that joins", "two parts that began apart"],
)
def test_a_node_with_another_run_is_refused_by_the_part_that_came_further(
    runs: dict[int, tuple[str, int]], started: tuple[bool, ...], expected: list[type], tmp_path: Path
) -> None:
    """`runs` is {node: (run, last step)}."""
    for node, (run_id, last_step) in runs.items():
        write_run(tmp_path / str(node), run_id, last_step=last_step)
    assert [type(error) for error in agree(tmp_path, started)] == expected


def share(tmp_path: Path, nodes: int, step: int) -> None:
    def work(context: DistributedContext) -> None:
        folder = RunFolder(tmp_path / str(context.rank), True, True, False)
        share_history(context, folder, step)

    assert run_ranks(nodes, work) == [None] * nodes


def generations(path: Path) -> int:
    return len(json.loads((path / "run.json").read_text())["generations"])


@pytest.mark.parametrize(
    ("here", "there", "step"),
    [(None, (2, 7), 5), ((1, 9), (2, 6), 6), ((5, 9), (2, 20), 20)],
    ids=["a node that joins", "a node that comes back", "a part that did not come as far"],
)
def test_the_history_comes_from_the_node_that_knows_most_of_it(
    here: tuple[int, int] | None, there: tuple[int, int], step: int, tmp_path: Path
) -> None:
    """Two nodes have (generations, last step) and go on from `step`: the second node's history is taken."""
    (tmp_path / "0").mkdir()
    if here is not None:
        write_run(tmp_path / "0", "abc", *here)
    write_run(tmp_path / "1", "abc", *there)
    share(tmp_path, 2, step)
    assert generations(tmp_path / "0") == 2
    assert read_metric(tmp_path / "0") == read_metric(tmp_path / "1")
    assert len(read_metric(tmp_path / "0")) == there[1] + 1


def test_a_run_that_died_before_its_first_record_is_a_history_too(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    write_run(tmp_path / "1", "abc")
    (tmp_path / "1" / "metrics.jsonl").unlink()
    share(tmp_path, 2, step=0)
    assert generations(tmp_path / "0") == 1


def test_a_node_that_cannot_take_the_records_keeps_its_own_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its run.json would claim records that the node lacks."""
    write_run(tmp_path / "0", "abc", generations=1, last_step=3)
    write_run(tmp_path / "1", "abc", generations=2, last_step=9)

    def fail(path: Path, content: bytes, sync: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mingpt.training.run_folder.write_atomic", fail)
    share(tmp_path, 2, step=9)
    assert generations(tmp_path / "0") == 1
