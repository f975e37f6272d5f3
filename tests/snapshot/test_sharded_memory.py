"""The snapshots that each rank writes to memory. Ranks are threads, or processes if they exchange copies."""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FaultyDisk
from support.forks import fork_ranks
from support.memory import MANIFEST, SHAPES, check_values, make_state
from support.ranks import run_ranks
from support.snapshots import make_manifest
from torch import Tensor

from mingpt.base.rows import split_rows
from mingpt.distributed import DistributedContext, Launch
from mingpt.snapshot import MemorySaver, MemorySnapshots, Sharding, SnapshotStore, TensorSpec
from mingpt.snapshot.memory import plan_copies
from mingpt.snapshot.slots import Slots
from mingpt.training.search import find_in_memory
from mingpt.training.state import check_shard

ROWS = 5
SPECS = {"model.a": TensorSpec(torch.float32, (ROWS, 3))}


def make_part(rank: int, workers: int, step: int) -> dict[str, Tensor]:
    rows = split_rows(ROWS, workers)[rank]
    whole = {"optimizer.a.step": torch.tensor(float(step))} if rank == 0 else {}
    return {"model.a": torch.full((len(rows), 3), float(step))} | whole


class Worker:
    """One rank, on the same node as the others."""

    def __init__(
        self, context: DistributedContext, folder: Path, memory: MemorySnapshots | None = None
    ) -> None:
        self.context, self.workers = context, context.world_size
        memory = memory or MemorySnapshots(str(folder), "id", folder, 0)
        rows = split_rows(ROWS, self.workers)
        sharding = Sharding(context, SPECS, lambda name: rows, weights_are_sharded=True)
        self.memory = MemorySaver(memory, sharding)

    def save(self, step: int, waits: bool = True) -> None:
        tensors = make_part(self.context.rank, self.workers, step)
        self.memory.save(make_manifest(step) | {"after": 0}, tensors)
        if waits and self.memory.thread:
            self.memory.thread.join()

    def steps(self) -> list[int]:
        return self.memory.own.store.steps()


def run_workers(workers: int, folder: Path, work: Any) -> list[Any]:
    return run_ranks(workers, lambda context: work(Worker(context, folder)), one_node=True)


def test_nobody_overwrites_the_step_before_while_any_worker_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there might be no step that all workers have."""

    may_go_on = threading.Event()
    commit = Slots.commit

    def slow_commit(self: Slots, manifest: dict[str, Any]) -> None:
        if manifest["shard"]["rank"] == 1 and manifest["step"] == 4:
            assert may_go_on.wait(30)
        commit(self, manifest)

    monkeypatch.setattr(Slots, "commit", slow_commit)

    def work(worker: Worker) -> list[int]:
        worker.save(2)
        for step in (4, 6, 8):
            worker.save(step, waits=worker.context.rank == 0)
        before = worker.steps()
        worker.context.all_gather_object(None)
        may_go_on.set()
        assert worker.memory.thread
        worker.memory.thread.join()
        worker.context.all_gather_object(None)
        worker.save(10)
        return [*before, *worker.steps()]

    assert run_workers(2, tmp_path, work) == [[4, 2, 10, 4], [2, 10, 4]]


@pytest.mark.parametrize(
    ("function", "path"), [("posix_fallocate", ""), ("replace", "/partial-step_00000004")]
)
def test_where_one_worker_has_no_room_none_writes_and_one_line_says_so(
    function: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FaultyDisk(monkeypatch, function, f"node-0-worker-1{path}")

    def work(worker: Worker) -> list[int]:
        for step in (2, 4, 6, 8):
            worker.save(step)
        return worker.steps()

    assert run_workers(2, tmp_path, work) == [[], []]
    (line,) = caplog.messages
    assert line.startswith("no snapshots in memory: ") and "after a kill the run resumes from disk" in line
    assert "No space left" in line
    assert list(tmp_path.glob("mingpt-*/*")) == []


def test_a_generation_of_another_size_keeps_what_it_started_from_until_it_has_written(tmp_path: Path) -> None:
    """There must be room for both snapshots, so older and newer ones are removed at once."""

    def first(worker: Worker) -> None:
        for step in (2, 4):
            worker.save(step)

    def second(worker: Worker) -> list[list[int]]:
        worker.memory.allocate(make_part(worker.context.rank, worker.workers, 0), start_step=2)
        worker.context.all_gather_object(None)
        steps = [worker.steps(), unused.steps()]
        for step in (4, 6, 8):
            worker.save(step)
            steps.append(worker.steps())
        return steps

    assert run_workers(3, tmp_path, first) == [None] * 3
    (root,) = tmp_path.glob("mingpt-*")
    unused = SnapshotStore(str(root / "node-0-worker-2"))
    assert unused.steps() == [4, 2]
    assert run_workers(2, tmp_path, second) == [[[2], [2], [4, 2], [6, 4], [8, 6]]] * 2
    assert sorted(path.name for path in root.glob("node-*")) == ["node-0-worker-0", "node-0-worker-1"]


def save_with_copies(
    context: DistributedContext,
    node_of: list[int],
    folder: Path,
    first_machine: int = 0,
    steps: Sequence[int] = (5, 10, 15),
) -> None:
    """Save these steps, as each rank does. Node 0 is the machine `first_machine`."""
    rank, node = context.rank, node_of[context.rank]
    context.launch = Launch(
        rank=rank, world_size=len(node_of), node_rank=node, local_rank=node_of[:rank].count(node)
    )
    specs = {name: TensorSpec(torch.float32, shape) for name, shape in SHAPES.items() if shape}
    rows = {name: split_rows(spec.shape[0], len(node_of)) for name, spec in specs.items()}
    sharding = Sharding(context, specs, rows.get, weights_are_sharded=True)
    memory = MemorySaver(memory_of(folder, node, node + first_machine), sharding)
    for step in steps:
        part = {}
        for name, tensor in make_state(step).items():
            if tensor.ndim:
                part[name] = tensor[rows[name][rank].start : rows[name][rank].stop]
            elif context.launch.local_rank == 0:
                part[name] = tensor
        memory.save(MANIFEST | {"step": step, "windows": step * 8}, part)
        assert memory.thread
        memory.thread.join()
        context.all_gather_object(None)


def memory_of(folder: Path, node: int, machine: int | None = None) -> MemorySnapshots:
    path = folder / f"memory-{node if machine is None else machine}"
    path.mkdir(exist_ok=True)
    return MemorySnapshots(str(path), "id", folder, node)


def test_each_of_two_nodes_has_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers keep the copies of three, and the other way round; the copies come in many pieces."""
    monkeypatch.setattr("mingpt.snapshot.layout.PIECE_BYTES", 100)
    node_of = [0, 0, 0, 1, 1]
    ended = fork_ranks(5, functools.partial(save_with_copies, node_of=node_of, folder=tmp_path))
    assert ended == [None] * 5, "no rank has raised an error"

    def newest(context: DistributedContext, node: int) -> int | None:
        found = find_in_memory(memory_of(tmp_path, node), context, -1, None, check_shard)
        return check_values(found, context) if found else None

    for node in (0, 1):
        assert run_ranks(1, functools.partial(newest, node=node)) == [15]
    names = {path.name for path in memory_of(tmp_path, 1).root.glob("node-*")}
    assert names == {"node-1-worker-0", "node-1-worker-1", "node-1-copy-0", "node-1-copy-1", "node-1-copy-2"}


def test_a_node_that_was_renumbered_keeps_no_folder_of_its_old_number(tmp_path: Path) -> None:
    """Another machine has that number now, and writes to a folder of the same name."""
    save = functools.partial(save_with_copies, folder=tmp_path)
    assert fork_ranks(3, functools.partial(save, node_of=[0, 1, 2])) == [None] * 3
    survivors = functools.partial(save, node_of=[0, 1], first_machine=1, steps=(20, 25))
    assert fork_ranks(2, survivors) == [None] * 2
    names = {machine: set(memory_of(tmp_path, 0, machine).folders()) for machine in (1, 2)}
    assert {path.name for path in names[1]} == {"node-0-worker-0", "node-0-copy-1"}
    assert {path.name for path in names[2]} == {"node-1-worker-0", "node-1-copy-0"}


def test_where_there_is_no_room_for_copies_each_worker_writes_its_own_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the three nodes is too small."""
    FaultyDisk(monkeypatch, "posix_fallocate", "node-1-copy-0")

    def work(context: DistributedContext) -> list[int]:
        worker = Worker(context, tmp_path, memory_of(tmp_path, context.rank))
        worker.save(2)
        worker.save(4)
        return worker.steps()

    assert run_ranks(3, work) == [[4, 2]] * 3
    (line,) = caplog.messages
    assert line.startswith("no copies of snapshots in memory on the next node: ")
    names = sorted(path.name for path in tmp_path.glob("memory-*/*/node-*"))
    assert names == ["node-0-worker-0", "node-1-worker-0", "node-2-worker-0"]


@pytest.mark.parametrize(
    ("node_of", "keeper"),
    [
        ([0], [None]),
        ([0, 0, 0], [None, None, None]),
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([0, 0, 0, 0, 1, 1, 2], [4, 5, 4, 5, 6, 6, 0]),
        ([3, 3, 7, 7], [2, 3, 0, 1]),
        ([1, 1, 0], [2, 2, 0]),
    ],
)
def test_a_copy_lies_on_the_next_node_and_a_node_shares_what_it_keeps(
    node_of: list[int], keeper: list[int | None]
) -> None:
    assert plan_copies(node_of) == keeper
