"""The newest snapshot that the nodes have in memory, whole or in parts that lie on several of them.

A sharded state is in memory as one part per worker, and a copy of each on the next node. A step counts if all
parts of it are there, from the same workers, wherever they lie. The number of workers may be another now.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mingpt.distributed import DistributedContext
from mingpt.errors import CorruptSnapshot, UnreadableSnapshot
from mingpt.parallel import split_rows
from mingpt.settings import flatten, settings
from mingpt.snapshot import Check, MemorySnapshots, Snapshot, SnapshotStore
from mingpt.snapshot.tensors import DTYPES
from mingpt.stored_state import Rows, Shape, StoredState
from mingpt.weights import is_sharded, snapshot_shapes, snapshot_vocab_size

AGREEING = ("step", "windows", "vocabulary", "tokenizer", "audit", "after")  # fields of the manifest


class Offer(NamedTuple):
    """A part that a rank can read, the `number`-th of those that it has found."""

    step: int
    key: str  # the same for all parts of one save
    rank: int  # whose rows these are, of `workers`
    workers: int
    has_whole: bool  # whether it holds the tensors that are not sharded, too
    number: int


@dataclass(frozen=True)
class Choice:
    """Who reads what. Places are (rank, number of its offer)."""

    shards: list[tuple[int, int]]  # by the rank whose rows they are
    whole: tuple[int, int]  # of what is not sharded

    def read_by(self, rank: int) -> list[int]:
        """The numbers of the offers that a rank reads."""
        return sorted({number for reader, number in (*self.shards, self.whole) if reader == rank})


def find_in_memory(
    memory: MemorySnapshots,
    context: DistributedContext,
    newer_than: int,
    saved_after: int | None,
    check: Check,
) -> StoredState | None:
    """The newest valid one past the step `newer_than` whose parts are all there. Collective.

    `saved_after`: see MemorySnapshots.find. The first worker of each node reads. What it has not to read, it
    does not verify.
    """
    reads = context.launch.local_rank == 0
    found = context.run_with_heartbeat(lambda: memory.find(newer_than, saved_after, check) if reads else [])
    valid, offered = set[int](), dict(enumerate(found))
    while True:
        offers = [describe(snapshot, index) for index, (_, snapshot) in offered.items()]
        choice = choose(context.all_gather_object(offers))
        if choice is None:
            return None
        unchecked = [index for index in choice.read_by(context.rank) if index not in valid]
        work = functools.partial(find_damaged, {index: found[index] for index in unchecked})
        damaged = context.run_with_heartbeat(work)
        for index in damaged:
            del offered[index]
        valid.update(index for index in unchecked if index not in damaged)
        if not any(context.all_gather_object(bool(damaged))):
            return assemble([snapshot for _, snapshot in found], choice, context)


def find_damaged(found: Mapping[int, tuple[SnapshotStore, Snapshot]]) -> list[int]:
    """Those whose checksum does not hold, or that are gone."""
    damaged = []
    for index, (store, snapshot) in found.items():
        try:
            store.verify(snapshot)
        except (CorruptSnapshot, UnreadableSnapshot):
            damaged.append(index)
    return damaged


def describe(snapshot: Snapshot, index: int) -> Offer:
    manifest = snapshot.manifest
    shard = manifest.get("shard") or {"rank": 0, "workers": 1}
    has_whole = any(not is_sharded(manifest, name, entry.shape) for name, entry in snapshot.entries.items())
    return Offer(manifest["step"], key_of(manifest), shard["rank"], shard["workers"], has_whole, index)


def key_of(manifest: Mapping[str, Any]) -> str:
    """A hash of what the parts of one save have in common."""
    given = flatten(manifest["config"])
    fields = {name: manifest.get(name) for name in AGREEING}
    fields |= {
        "config": {key: given.get(key) for key, setting in settings().items() if setting.affects_result},
        "data": manifest["data"]["sha256"],
        "shard": {key: value for key, value in (manifest.get("shard") or {}).items() if key != "rank"},
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def choose(offers: Sequence[Sequence[Offer]]) -> Choice | None:
    """The newest save of which everything is on offer by some rank; `offers` are by rank."""
    saves: dict[tuple[int, str], list[tuple[int, Offer]]] = {}
    for reader, own in enumerate(offers):
        for offer in own:
            saves.setdefault((offer.step, offer.key), []).append((reader, offer))
    for save in sorted(saves, reverse=True):
        shards: dict[int, tuple[int, int]] = {}
        whole = []
        for reader, offer in saves[save]:
            shards.setdefault(offer.rank, (reader, offer.number))
            if offer.has_whole:
                whole.append((reader, offer.number))
        workers = saves[save][0][1].workers
        if whole and len(shards) == workers:
            by_rank = [shards[rank] for rank in range(workers)]
            return Choice(by_rank, next((place for place in whole if place in by_rank), whole[0]))
    return None


def assemble(found: Sequence[Snapshot], choice: Choice, context: DistributedContext) -> StoredState:
    """The state that the chosen parts are together. Collective; `found` are this rank's."""
    own = [found[index] for index in choice.read_by(context.rank)]
    reader, index = choice.whole
    whole = found[index] if reader == context.rank else None
    content = (whole.manifest, shapes_of(whole)) if whole else None
    manifest, whole_tensors = context.broadcast_object(content, reader)
    unwritten = context.all_gather_object([one.manifest.get("unwritten", []) for one in own])
    records: list[Any] = next((records for lists in unwritten for records in lists if records), [])
    shapes = {name: shape for name, (shape, _) in whole_tensors.items()}
    dtypes = {name: DTYPES[dtype] for name, (_, dtype) in whole_tensors.items()}
    rows = [Rows(name, 0, shape[0] if shape else 1, reader) for name, shape in shapes.items()]
    sharded = sharded_shapes(manifest)
    for name, shape in sharded.items():
        parts = zip(split_rows(shape[0], len(choice.shards)), choice.shards, strict=True)
        rows += [Rows(name, part.start, part.stop, source) for part, (source, _) in parts if part]
    by_rank = {
        rank: found[place] for rank, (source, place) in enumerate(choice.shards) if source == context.rank
    }

    def read(name: str, begin: int, end: int) -> Tensor:
        if name not in sharded:
            assert whole is not None
            return whole.read(name, begin, end) if shapes[name] else whole.read(name)
        parts = split_rows(sharded[name][0], len(choice.shards))
        rank = begin // len(parts[0])
        return by_rank[rank].read(name, begin - parts[rank].start, end - parts[rank].start)

    manifest = {key: value for key, value in manifest.items() if key not in ("shard", "unwritten")}
    return StoredState(
        manifest | ({"unwritten": records} if records else {}),
        shapes | sharded,
        dtypes | dict.fromkeys(sharded, torch.float32),
        sorted(rows, key=lambda part: part.rank),  # so that a rank sends many rows at once
        read,
    )


def shapes_of(snapshot: Snapshot) -> dict[str, tuple[Shape, str]]:
    """Shape and type of each tensor that is not sharded."""
    return {
        name: (entry.shape, entry.dtype)
        for name, entry in snapshot.entries.items()
        if not is_sharded(snapshot.manifest, name, entry.shape)
    }


def sharded_shapes(manifest: dict[str, Any]) -> dict[str, Shape]:
    """Of the whole tensors of which each part has some rows."""
    if not manifest.get("shard"):
        return {}
    shapes = snapshot_shapes(manifest, snapshot_vocab_size(manifest))
    return {name: shape for name, shape in shapes.items() if is_sharded(manifest, name, shape)}
