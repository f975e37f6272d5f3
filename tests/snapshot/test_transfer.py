"""Tensor files of a state whose rows several ranks hold: they equal those of a rank that holds all of it."""

import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterable
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
from mingpt.distributed.group import BackgroundGroup
from mingpt.snapshot import Keep, Saver, Store
from mingpt.snapshot import layout as layout_module
from mingpt.snapshot import saver as saver_module
from mingpt.snapshot.layout import Layout
from mingpt.snapshot.manifest import FileRecord

Tensors = dict[str, Tensor]
STEP, CHUNK_BYTES = 7, 100


def state() -> Tensors:
    """A state with sharded tensors, one with fewer rows than ranks, a scalar, and a tokenizer's bytes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.wte": torch.randn(11, 6, generator=generator),
        "model.one_row": torch.randn(1, 50, generator=generator),
        "model.bias": torch.randn(7, generator=generator),
        "model.half": torch.randn(5, 3, generator=generator).bfloat16(),
        "optimizer.wte.step": torch.tensor(3.0),
        "optimizer.wte.exp_avg": torch.randn(11, 6, generator=generator),
        "optimizer.wte.exp_avg_sq": torch.randn(11, 6, generator=generator),
        "tokenizer": torch.arange(201, dtype=torch.uint8),
    }


def part_of(tensors: Tensors, rows: RowMap, rank: int, main_rank: int) -> Tensors:
    """The tensors that a rank gives to a snapshot."""
    parts = {}
    for name, tensor in tensors.items():
        if rows.by_rank(name):
            parts[name] = tensor[rows.of(name, rank).start : rows.of(name, rank).stop].clone()
        elif rank == main_rank:
            parts[name] = tensor.clone()
    return parts


def local_files(folder: Path, tensors: Tensors) -> dict[str, bytes]:
    """The tensor files that one rank with all of the state writes."""
    store = make_store(folder)
    write(store, make_manifest(STEP), tensors)
    return read_files(store)


def read_files(store: Store) -> dict[str, bytes]:
    return {
        name: (Path(store.root) / name).read_bytes() for name in file_names(store) if "safetensors" in name
    }


Prepare = Callable[[Saver, DistributedContext], None]


def save_together(
    folder: Path,
    main_rank: int = 0,
    prepare: Prepare = lambda saver, context: None,
    before: Callable[[], None] = lambda: None,
) -> Callable[[DistributedContext], tuple[str, int]]:
    """A function that does a rank's part in saving `state()`; it returns the saver's error and its errno."""

    def work(context: DistributedContext) -> tuple[str, int]:
        vars(saver_module)["PIECE_BYTES"] = vars(layout_module)["PIECE_BYTES"] = CHUNK_BYTES
        tensors, workers = state(), context.world_size
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rows = RowMap(shapes, workers, ("model.", "optimizer."))
        store = Store(str(folder / "snapshots"), retries_s=())
        saver = Saver(store, None, rows, BackgroundGroup(context.rank, workers), main_rank)
        prepare(saver, context)
        part = part_of(tensors, rows, context.rank, main_rank)
        saver.save(make_manifest(STEP), part, Keep(3), before if context.rank == 0 else lambda: None)
        for tensor in part.values():
            tensor.zero_()  # the next step overwrites tensors, so the saver must have copied them
        saver.wait()
        is_lost = saver.error is not None and is_lost_peer(saver.error)
        return "lost peer" if is_lost else type(saver.error).__name__, getattr(
            saver.error, "errno", None
        ) or 0

    return work


@pytest.mark.parametrize(("workers", "main_rank"), [(1, 0), (2, 0), (3, 0), (3, 1), (4, 3)])
def test_the_files_are_those_of_one_rank_that_has_all_of_the_state(
    workers: int, main_rank: int, tmp_path: Path
) -> None:
    """The rows travel in pieces smaller than a tensor; the snapshot can be read."""
    tensors = state()
    expected = local_files(tmp_path / "alone", tensors)
    store = make_store(tmp_path)
    work = save_together(tmp_path, main_rank)
    assert results_of(workers, work) == [("NoneType", 0)] * workers
    assert read_files(store) == expected
    assert len(expected) == 2
    snapshot = store.read(STEP)
    assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in tensors.items())


def breaking_off(error: Exception, fails: Callable[[int], bool]) -> Prepare:
    """Let a file break off in the middle if `fails` is true of the number of files so far, from 1."""

    def prepare(saver: Saver, context: DistributedContext) -> None:
        write_file, numbers = saver.store.write_file, itertools.count(1)

        def write(layout: Layout, chunks: Iterable[memoryview]) -> FileRecord:
            if not fails(next(numbers)):
                return write_file(layout, chunks)
            next(iter(chunks))
            raise error

        saver.store.write_file = write  # type: ignore[method-assign]

    return prepare


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


class TwoArguments(Exception):
    """An exception that cannot be made again from its message."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize("file", [1, 2])
@pytest.mark.parametrize(
    ("error", "found"),
    [
        (NO_ROOM, ("OSError", errno.ENOSPC)),
        (ClaimLost("superseded"), ("ClaimLost", 0)),
        (TwoArguments("the server", "503"), ("OSError", 0)),
    ],
)
def test_a_write_that_fails_on_one_rank_is_the_error_of_all(
    file: int, error: Exception, found: tuple[str, int], tmp_path: Path
) -> None:
    """No rank waits for ever. The files that were written are removed, unless another job may own them."""
    store = make_store(tmp_path)
    work = save_together(tmp_path, prepare=breaking_off(error, lambda number: number == file))
    assert results_of(3, work) == [found] * 3
    assert store.steps() == [] and (file_names(store) == [] or isinstance(error, ClaimLost))


@pytest.mark.parametrize("where", ["begin", "commit", "before"])
@pytest.mark.parametrize("error", [ClaimLost("superseded"), OSError(errno.EIO, "broken")])
def test_what_the_main_rank_cannot_do_is_the_error_of_all(
    where: str, error: Exception, tmp_path: Path
) -> None:
    def fail(*_: object) -> Any:
        raise error

    def prepare(saver: Saver, context: DistributedContext) -> None:
        if context.rank == 0 and where != "before":
            setattr(saver.store, where, fail)

    store = make_store(tmp_path)
    before = fail if where == "before" else lambda: None
    results = results_of(3, save_together(tmp_path, prepare=prepare, before=before))
    assert results == [(type(error).__name__, getattr(error, "errno", None) or 0)] * 3
    assert store.steps() == []
    assert isinstance(error, ClaimLost) or file_names(store) == [], "a job that took over may write there"


def dying_in_exchange(rank: int, number: int) -> Prepare:
    """Let a rank die in the background group's exchange of this number."""

    def prepare(saver: Saver, context: DistributedContext) -> None:
        if context.rank != rank:
            return
        gather_on_all, calls = saver.group.gather_on_all, []

        def die(work: Callable[[], Any]) -> list[Any]:
            calls.append(work)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return gather_on_all(work)

        saver.group.gather_on_all = die  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_a_rank_that_dies_between_the_files_is_no_failure_to_write(exchange: int, tmp_path: Path) -> None:
    """The rank dies in the exchange of late fields, before the files, or after the last file: no warning."""
    store = make_store(tmp_path)
    prepare = dying_in_exchange(0, exchange)
    results = fork_ranks(3, save_together(tmp_path, prepare=prepare), timeout_s=30)
    assert results == [None, ("lost peer", 0), ("lost peer", 0)], "nobody reports it but the main thread"
    assert store.steps() == []
