"""The snapshots that each rank writes to memory. Ranks are threads, or processes if they exchange copies."""

import functools
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FaultyDisk
from support.forks import fork_ranks
from support.memory import FIELDS, SHAPES, check_values, make_state
from support.ranks import run_ranks
from support.snapshots import make_manifest
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext, Launch, Place
from mingpt.snapshot import Manifest, MemorySaver, MemorySnapshots, Store, find_latest
from mingpt.snapshot.contents import stored_rows
from mingpt.snapshot.memory import plan_copies
from mingpt.snapshot.reading import accept_all

ROWS = {"model.a": (5, 3), "optimizer.a.step": ()}


def make_part(rank: int, workers: int, step: int) -> dict[str, Tensor]:
    rows = RowMap(ROWS, workers, ("model.",)).of("model.a", rank)
    whole = {"optimizer.a.step": torch.tensor(float(step))} if rank == 0 else {}
    return {"model.a": torch.full((len(rows), 3), float(step))} | whole


class Worker:
    """One rank, on the same node as the others."""

    def __init__(self, context: DistributedContext, folder: Path) -> None:
        self.context, self.workers = context, context.world_size
        snapshots = MemorySnapshots(str(folder), "id", folder)
        rows = RowMap(ROWS, self.workers, ("model.",))
        self.memory = MemorySaver(snapshots, context, rows, context.broadcast_object(uuid.uuid4().hex, 0))

    def save(self, *steps: int, waits: bool = True) -> None:
        for step in steps:
            self.memory.save(make_manifest(step), make_part(self.context.rank, self.workers, step))
            if waits and self.memory.thread:
                self.memory.thread.join()

    def steps(self) -> list[int]:
        return self.memory.own.store.steps()


def run_workers(workers: int, folder: Path, work: Any) -> list[Any]:
    return run_ranks(workers, lambda context: work(Worker(context, folder)), one_node=True)


def test_nobody_removes_the_step_before_while_any_worker_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there might be no step that all workers have."""
    may_go_on = threading.Event()
    commit = Store.commit

    def slow_commit(self: Store, manifest: Manifest) -> None:
        if manifest.shard and manifest.shard.rank == 1 and manifest.step == 4:
            assert may_go_on.wait(30)
        commit(self, manifest)

    monkeypatch.setattr(Store, "commit", slow_commit)

    def work(worker: Worker) -> list[int]:
        worker.save(2)
        worker.save(4, 6, 8, waits=worker.context.rank == 0)
        before = worker.steps()
        worker.context.all_gather_object(None)
        may_go_on.set()
        assert worker.memory.thread
        worker.memory.thread.join()
        worker.context.all_gather_object(None)
        worker.save(10)
        return [*before, *worker.steps()]

    assert run_workers(2, tmp_path, work) == [[4, 2, 10, 4], [2, 10, 4]]


def test_where_one_worker_cannot_write_none_does_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FaultyDisk(monkeypatch, "replace", "-1/partial-step_00000004.json")
    assert run_workers(2, tmp_path, lambda worker: worker.save(2, 4, 6, 8)) == [None, None]
    (line,) = caplog.messages
    assert line.startswith("no snapshots in memory: ") and "after a kill the run resumes from disk" in line
    assert "No space left" in line
    assert list(tmp_path.iterdir()) == []


def save_with_copies(
    context: DistributedContext, node_of: list[int], folder: Path, steps: Sequence[int] = (5, 10, 15)
) -> str | None:
    """Save these steps, as each rank does; returns why it cannot. Each node has a folder for its memory."""
    rank, node = context.rank, node_of[context.rank]
    context.launch = Launch(
        rank=rank, world_size=len(node_of), node_rank=node, local_rank=node_of[:rank].count(node)
    )
    rows = RowMap(SHAPES, len(node_of), ("model.", "optimizer."))
    context.places = [Place(other, 0, "") for other in node_of]
    generation = context.broadcast_object(uuid.uuid4().hex, 0)
    memory = MemorySaver(memory_of(folder, node), context, rows, generation)
    for step in steps:
        part = {}
        for name, tensor in make_state(step).items():
            if tensor.ndim:
                part[name] = tensor[rows.of(name, rank).start : rows.of(name, rank).stop]
            elif context.launch.local_rank == 0:
                part[name] = tensor
        memory.save(make_manifest(step, **FIELDS), part)
        if memory.thread:
            memory.thread.join()
        context.all_gather_object(None)
    return memory.problem


def memory_of(folder: Path, node: int) -> MemorySnapshots:
    path = folder / f"memory-{node}"
    path.mkdir(exist_ok=True)
    return MemorySnapshots(str(path), "id", folder)


def newest(context: DistributedContext, folder: Path, node: int) -> int | None:
    """The newest step of which this node has all parts; also compares the values."""
    disk = Store(str(folder / "disk"))
    stores = memory_of(folder, node).stores()
    state = find_latest(disk, stores, context, accept_all, stored_rows, is_restart=True).state
    return check_values(state, context) if state else None


@pytest.mark.parametrize("node_of", [[0, 0, 0, 1, 1], [0, 1]])
def test_each_of_two_nodes_has_the_whole_state(
    node_of: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers keep the copies of three, and the other way round; the copies come in many pieces."""
    for module in ("layout", "saver"):
        monkeypatch.setattr(f"mingpt.snapshot.{module}.PIECE_BYTES", 100)
    work = functools.partial(save_with_copies, node_of=node_of, folder=tmp_path)
    assert fork_ranks(len(node_of), work) == [None] * len(node_of), "no rank has raised an error"
    for node in (0, 1):
        assert run_ranks(1, functools.partial(newest, folder=tmp_path, node=node)) == [15]
        folders = memory_of(tmp_path, node).folders()
        assert sorted(path.name.partition("-")[2] for path in folders) == sorted(
            f"{rank}{'' if own == node else '-copy'}" for rank, own in enumerate(node_of)
        )


def test_a_copy_that_cannot_be_written_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyDisk(monkeypatch, "replace", "0-copy/partial-step_00000010")
    problems = fork_ranks(3, functools.partial(save_with_copies, node_of=[0, 1, 2], folder=tmp_path))
    assert [isinstance(problem, str) for problem in problems] == [False, True, False]
    assert list(tmp_path.glob("memory-*/*")) == []


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
