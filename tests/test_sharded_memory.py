"""What each rank writes to memory; ranks are threads of one node, so there are no copies. Jobs have them."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.snapshots import make_manifest
from torch import Tensor

from mingpt.distributed import DistributedContext
from mingpt.parallel import split_rows
from mingpt.sharded_memory import Copies, ShardedMemory
from mingpt.snapshot import MemorySnapshots, SnapshotStore, TensorSpec
from mingpt.snapshot.slots import Slots

ROWS = 5
SPECS = {"model.a": TensorSpec(torch.float32, (ROWS, 3))}


def make_part(rank: int, workers: int, step: int) -> dict[str, Tensor]:
    rows = split_rows(ROWS, workers)[rank]
    whole = {"optimizer.a.step": torch.tensor(float(step))} if rank == 0 else {}
    return {"model.a": torch.full((len(rows), 3), float(step))} | whole


class Worker:
    """One rank, on a node with the others."""

    def __init__(self, context: DistributedContext, folder: Path) -> None:
        self.context, self.workers = context, context.world_size
        memory = MemorySnapshots(str(folder), "id", folder, 0)
        rows = split_rows(ROWS, self.workers)
        self.memory = ShardedMemory(memory, context, SPECS, lambda name: rows, shards_weights=True)

    def save(self, step: int, waits: bool = True) -> None:
        tensors = make_part(self.context.rank, self.workers, step)
        self.memory.save(make_manifest(step) | {"after": 0}, tensors)
        if waits and self.memory.thread:
            self.memory.thread.join()

    def steps(self) -> list[int]:
        return self.memory.own.store.steps()


def run_workers(workers: int, folder: Path, work: Any) -> list[Any]:
    results = run_ranks(workers, lambda context: work(Worker(context, folder)), one_node=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_each_worker_keeps_its_newest_two(tmp_path: Path) -> None:
    def work(worker: Worker) -> list[int]:
        for step in (2, 4, 6):
            worker.save(step)
        (snapshot,) = [worker.memory.own.store.read(6)]
        part = make_part(worker.context.rank, worker.workers, 6)
        assert all(torch.equal(tensor, part[name]) for name, tensor in snapshot.tensors().items())
        assert snapshot.entries.keys() == part.keys()
        assert snapshot.manifest["shard"]["rank"] == worker.context.rank
        return worker.steps()

    assert run_workers(3, tmp_path, work) == [[6, 4]] * 3
    names = sorted(path.name for path in next(tmp_path.glob("mingpt-*")).glob("node-*"))
    assert names == ["node-0-worker-0", "node-0-worker-1", "node-0-worker-2"]


def test_nobody_overwrites_the_step_before_while_any_worker_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there might be no step at all that all workers have."""

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


@pytest.mark.parametrize("when", ["allocating", "writing"])
def test_where_one_worker_has_no_room_none_writes_and_one_line_says_so(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fallocate, commit = os.posix_fallocate, Slots.commit

    def full(handle: int, offset: int, size: int) -> None:
        if "node-0-worker-1" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(handle, offset, size)

    def broken_commit(self: Slots, manifest: dict[str, Any]) -> None:
        if manifest["shard"]["rank"] == 1 and manifest["step"] == 4:
            raise OSError(errno.EIO, "Input/output error")
        commit(self, manifest)

    if when == "allocating":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(Slots, "commit", broken_commit)

    def work(worker: Worker) -> list[int]:
        for step in (2, 4, 6, 8):
            worker.save(step)
        return worker.steps()

    assert run_workers(2, tmp_path, work) == [[], []]
    (line,) = caplog.messages
    assert line.startswith("no snapshots in memory: ") and "after a kill the run resumes from disk" in line
    assert ("No space left" if when == "allocating" else "Input/output error") in line
    assert list(tmp_path.glob("mingpt-*/*")) == []


def test_a_generation_of_another_size_keeps_what_it_started_from_until_it_has_written(tmp_path: Path) -> None:
    """There must be room for both, so what is older or newer goes at once."""

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

    run_workers(3, tmp_path, first)
    (root,) = tmp_path.glob("mingpt-*")
    unused = SnapshotStore(str(root / "node-0-worker-2"))
    assert unused.steps() == [4, 2]
    assert run_workers(2, tmp_path, second) == [[[2], [2], [4, 2], [6, 4], [8, 6]]] * 2
    assert sorted(path.name for path in root.glob("node-*")) == ["node-0-worker-0", "node-0-worker-1"]


def test_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        worker.save(2, waits=False)
        worker.memory.remove()

    run_workers(3, tmp_path, work)
    run_workers(2, tmp_path, work)
    assert list(tmp_path.iterdir()) == []


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
    copies = Copies.plan(node_of)
    assert copies.keeper == keeper
    kept = [copies.kept_by(rank) for rank in range(len(node_of))]
    assert sorted(rank for ranks in kept for rank in ranks) == [
        rank for rank, one in enumerate(keeper) if one is not None
    ]
