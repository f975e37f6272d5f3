"""Snapshots that ranks save together: the files equal those of one rank that has the whole state."""

import errno
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import fork_ranks, results_of
from support.snapshots import file_names, make_manifest, make_store, write
from torch import Tensor

from mingpt.base.errors import ClaimLost
from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext
from mingpt.distributed.exit import is_lost_peer
from mingpt.snapshot import Saver, Store, Tier
from mingpt.snapshot import layout as layout_module
from mingpt.snapshot import saver as saver_module
from mingpt.snapshot.layout import Layout
from mingpt.snapshot.manifest import FileRecord

Tensors = dict[str, Tensor]
TOKENIZER = bytes(range(201))
# What is sharded with DDP, with trainer.shard_optimizer, and with FSDP.
SHARDED: list[tuple[str, ...]] = [(), ("optimizer.",), ("model.", "optimizer.")]
FSDP = SHARDED[-1]


def make_tensors(step: int) -> Tensors:
    """Tensors of several types; one has fewer rows than there are ranks, and one is a scalar."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.wte": torch.randn(11, 6, generator=generator),
        "model.one_row": torch.randn(1, 50, generator=generator),
        "model.bias": torch.randn(7, generator=generator),
        "model.half": torch.randn(5, 3, generator=generator).bfloat16(),
        "optimizer.wte.step": torch.tensor(float(step)),
        "optimizer.wte.exp_avg": torch.randn(11, 6, generator=generator),
        "optimizer.wte.exp_avg_sq": torch.randn(11, 6, generator=generator),
    }


def read_files(folder: Path, step: int) -> dict[str, bytes]:
    """The content of all files of `step` in this folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"step_{step:08d}*"))}


def make_rank_saver(
    context: DistributedContext, folder: Path, writers: Sequence[int], sharded: tuple[str, ...]
) -> Saver:
    """A rank's Saver. Each rank has folders of its own, as if no two nodes shared one."""
    for module in (saver_module, layout_module):
        vars(module)["PIECE_BYTES"] = 100  # so that a tensor travels in several pieces
    rank, shapes = context.rank, {name: tuple(tensor.shape) for name, tensor in make_tensors(1).items()}
    tiers = [
        Tier(name, Store(str(folder / f"{name}-{rank}"), retries_s=()), keep=keep, writers=writers)
        for name, keep in (("memory", 1), ("disk", 3))
    ]
    tiers[0].is_durable = False
    for tier in tiers if rank in writers else ():
        Path(tier.store.root).mkdir(parents=True)
    return Saver(tiers, TOKENIZER, RowMap(shapes, context.world_size, sharded), rank)


def save(saver: Saver, step: int, before: Callable[[], None] = lambda: None) -> None:
    """Save `step` to all tiers, and wait. The tensors change while the copies are being written."""
    rows = saver.rows
    own = {}
    for name, tensor in make_tensors(step).items():
        held = rows.of(name, saver.rank)
        own[name] = tensor[held.start : held.stop].clone() if rows.by_rank(name) else tensor.clone()
    saver.save(make_manifest(step), own, before=before)
    for tensor in own.values():
        tensor.zero_()
    saver.wait()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_files_on_each_disk_and_in_each_memory_are_those_of_one_rank_with_the_whole_state(
    workers: int, tmp_path: Path
) -> None:
    writers = sorted({0, workers // 2})

    def work(context: DistributedContext) -> list[tuple[Exception | None, int]]:
        outcomes = []
        for number, sharded in enumerate(SHARDED):
            saver = make_rank_saver(context, tmp_path / str(number), writers, sharded)
            if saver.is_sharded or context.rank in writers:  # as in `Saving.save`
                for step in (3, 7):
                    save(saver, step)
                outcomes += [(tier.error, tier.written) for tier in saver.tiers]
        return outcomes

    expected = {}
    for step in (3, 7):
        alone = make_store(tmp_path)
        write(alone, make_manifest(step), make_tensors(step), TOKENIZER)
        expected[step] = read_files(Path(alone.root), step)
        assert len(expected[step]) == 4
    for outcomes in results_of(workers, work):
        assert set(outcomes) == {(None, 7)}
    for number in range(len(SHARDED)):
        for rank in range(workers):
            for name, steps in (("memory", [7]), ("disk", [7, 3])):
                store = Store(str(tmp_path / str(number) / f"{name}-{rank}"))
                if rank not in writers:
                    assert not Path(store.root).exists()
                    continue
                assert store.steps() == steps
                for step in steps:
                    assert read_files(Path(store.root), step) == expected[step]
                found = store.read(7)
                assert all(torch.equal(found.read(key), value) for key, value in make_tensors(7).items())
                assert found.read_tokenizer() == TOKENIZER


Prepare = Callable[[Saver], None]
Result = tuple[str, int, list[str]]  # the kind of the disk's error, its errno, and the lines of the log


def save_with_fault(
    folder: Path, writers: Sequence[int], prepare: Prepare, before: Callable[[], None] = lambda: None
) -> Callable[[DistributedContext], Result]:
    """A function that does a rank's part in saving step 7 with FSDP, to disk only, after `prepare`."""

    def work(context: DistributedContext) -> Result:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mingpt").addHandler(handler)
        saver = make_rank_saver(context, folder, writers, FSDP)
        del saver.tiers[0]
        prepare(saver)
        save(saver, 7, before if context.rank == 0 else lambda: None)
        error = saver.tiers[0].error
        kind = "lost peer" if error and is_lost_peer(error) else type(error).__name__
        return kind, getattr(error, "errno", None) or 0, lines

    return work


def disk_of(folder: Path, rank: int) -> Store:
    return Store(str(folder / f"disk-{rank}"))


def failing_files(on: int, error: Exception, at: int) -> Prepare:
    """Let rank `on` fail in the middle of its tensor file number `at`, from 1."""

    def prepare(saver: Saver) -> None:
        store = saver.tiers[0].store
        write_file, numbers = store.write_file, itertools.count(1)

        def write(layout: Layout, chunks: Iterable[memoryview]) -> FileRecord:
            if next(numbers) != at:
                return write_file(layout, chunks)
            next(iter(chunks))
            raise error

        if saver.rank == on:
            store.write_file = write  # type: ignore[method-assign]

    return prepare


class TwoArguments(Exception):
    """An exception that cannot be made again from its message."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("at", "error", "failed", "reason"),
    [
        (1, FULL, ("OSError", errno.ENOSPC), "No space left on device"),
        (2, FULL, ("OSError", errno.ENOSPC), "No space left on device"),
        (2, TwoArguments("the server", "503"), ("OSError", 0), "OSError: TwoArguments: the server: 503"),
    ],
)
@pytest.mark.parametrize("full", [0, 2])
def test_a_writer_that_fails_keeps_no_other_writer_from_its_snapshot(
    full: int, at: int, error: Exception, failed: tuple[str, int], reason: str, tmp_path: Path
) -> None:
    """A rank that does not write, rank 1, learns what happened to the main writer, rank 0."""
    results = results_of(3, save_with_fault(tmp_path, [0, 2], failing_files(full, error, at)))
    fine = "NoneType", 0
    assert results[full] == (*failed, [f"snapshot of step 7 could not be written: {reason}"])
    assert results[1] == (*(failed if full == 0 else fine), [])
    assert results[2 - full] == (*fine, [])
    assert file_names(disk_of(tmp_path, full)) == [], "the space of a failed save is free again"
    whole = disk_of(tmp_path, 2 - full).read(7)
    assert all(torch.equal(whole.read(name), tensor) for name, tensor in make_tensors(7).items())


def test_the_files_of_a_writer_that_has_lost_its_claim_stay_and_nothing_is_logged(tmp_path: Path) -> None:
    """Another job may own the files. The main thread reports the loss."""
    work = save_with_fault(tmp_path, [0], failing_files(0, ClaimLost("superseded"), 2))
    assert results_of(3, work) == [("ClaimLost", 0, [])] * 3
    assert "step_00000007.safetensors" in file_names(disk_of(tmp_path, 0))


@pytest.mark.parametrize("where", ["begin", "commit", "before"])
def test_a_save_that_fails_before_or_after_the_files_keeps_no_rank_waiting(
    where: str, tmp_path: Path
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(errno.EIO, "broken")

    def prepare(saver: Saver) -> None:
        if saver.rank == 0 and where != "before":
            setattr(saver.tiers[0].store, where, fail)

    before = fail if where == "before" else lambda: None
    results = results_of(3, save_with_fault(tmp_path, [0, 2], prepare, before))
    assert results[0][:2] == ("OSError", errno.EIO)
    assert results[2][0] == ("OSError" if where == "before" else "NoneType")
    steps = [disk_of(tmp_path, rank).steps() if rank != 1 else [] for rank in range(3)]
    assert steps == ([[], [], []] if where == "before" else [[], [], [7]])


def dying(rank: int, method: str, number: int) -> Prepare:
    """Let `rank` be killed when it calls this method of its background group for the `number`-th time."""

    def prepare(saver: Saver) -> None:
        if saver.rank != rank:
            return
        real, numbers = getattr(saver.group, method), itertools.count(1)

        def die(*arguments: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(saver.group, method, die)

    return prepare


@pytest.mark.parametrize(
    ("rank", "method", "number"),
    [(0, "gather_on_all", 1), (0, "gather_on_all", 2), (0, "receive", 5), (1, "send", 2), (2, "receive", 1)],
)
def test_a_rank_that_is_killed_in_a_save_is_a_lost_peer_and_no_failed_write(
    rank: int, method: str, number: int, tmp_path: Path
) -> None:
    """No warning says that the disk failed. No writer has a snapshot of that step."""
    work = save_with_fault(tmp_path, [0, 2], dying(rank, method, number))
    results = fork_ranks(3, work, timeout_s=30)
    assert results[rank] is None
    others = [result for other, result in enumerate(results) if other != rank]
    assert others == [("lost peer", 0, [])] * 2, "only the main thread reports it"
    for writer in (0, 2):
        assert not list((tmp_path / f"disk-{writer}").glob("step_*.json"))
