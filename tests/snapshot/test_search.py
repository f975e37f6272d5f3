"""The search for the newest snapshot on disk or in memory; nodes are folders, ranks threads."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.memory import FIELDS, check_values, make_state
from support.ranks import run_ranks
from support.single_process import SingleProcess
from support.snapshots import make_manifest, search, write

from mingpt.base.errors import CorruptSnapshot
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Check, Found, Manifest, Store
from mingpt.snapshot.manifest import is_distrusted
from mingpt.snapshot.reading import Entries
from mingpt.snapshot.search import Offer, choose
from mingpt.training.contents import check_model


def on_disk(step: int, reader: int = 0, **fields: Any) -> Offer:
    return Offer(step, True, "the disk", reader, 0, **fields)


def in_memory(step: int, reader: int = 0, store: int = 1, after: int = 0) -> Offer:
    return Offer(step, False, "the memory", reader, store, make_manifest(step, after=after))


@pytest.mark.parametrize(
    ("chosen", "others", "saved_after"),
    [
        (on_disk(5), [on_disk(4), in_memory(3)], None),
        (in_memory(6), [on_disk(5)], None),
        (on_disk(5), [in_memory(5)], None),
        (on_disk(5, 1), [in_memory(5, 0)], None),
        (on_disk(5, 1), [on_disk(5, 2), on_disk(4, 0)], None),
        (in_memory(5, 1, 2), [in_memory(5, 1, 3), in_memory(5, 2, 1)], None),
        (on_disk(4), [on_disk(5, fault="damaged", is_corrupt=True), on_disk(6, fault="unreadable")], None),
        (on_disk(4), [Offer(-1, True, "the disk", 1, 0, fault="cannot be listed")], None),
        (on_disk(0), [], 0),
        (in_memory(12, after=10), [on_disk(5)], None),
        (in_memory(12, after=10), [on_disk(10)], 10),
        (on_disk(5), [in_memory(12, after=10)], 9),
        (in_memory(3), [in_memory(12, after=10)], 5),
        (None, [in_memory(12, after=10), on_disk(5, fault="damaged")], 9),
        (None, [], None),
    ],
)
def test_the_newest_snapshot_without_a_fault_is_chosen_whatever_the_order_of_the_offers(
    chosen: Offer | None, others: list[Offer], saved_after: int | None
) -> None:
    offers = [chosen, *others] if chosen else others
    for seed in range(10):
        random.Random(seed).shuffle(offers)
        assert choose(offers, saved_after) == chosen


class Nodes:
    """Some nodes, each with a disk and a memory of its own."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.disks, self.memories = (
            [Store(str(folder / f"{kind}{node}"), retries_s=()) for node in range(nodes)]
            for kind in ("disk", "memory")
        )
        self.tokenizers = set[bytes | None]()  # of the states that were found, on all ranks
        for store in (*self.disks, *self.memories):
            store.prepare()

    def search(
        self, check: Check = check_model, is_restart: bool = True, nodes: Sequence[int] = ()
    ) -> tuple[int, list[Found]]:
        """Search with two workers on each of `nodes` (by default all); return the step, and what each finds.

        The step is -1 if there is no snapshot. The values on all ranks are checked.
        """
        present = list(nodes) or [*range(len(self.disks))]

        def work(context: DistributedContext) -> tuple[int, Found]:
            node, local_rank = present[context.rank // 2], context.rank % 2
            context.launch = replace(context.launch, node_rank=node, local_rank=local_rank)
            stores = [self.disks[node], self.memories[node]]
            found, state = search(stores, context, check, is_restart)
            self.tokenizers.add(state.tokenizer if state else None)
            return check_values(state, context) if state else -1, found

        results = run_ranks(2 * len(present), work)
        for result in results:
            if isinstance(result, Exception):
                raise result
        assert len({result[0] for result in results}) == 1  # type: ignore[index]
        return results[0][0], [result[1] for result in results]  # type: ignore[index]


def write_state(store: Store, step: int, content: bytes | None = None, **fields: Any) -> None:
    """Write the state of `step`, and the tokenizer's bytes, if any; `fields` are more of the manifest's."""
    write(store, make_manifest(step, **FIELDS | fields), make_state(step), content)


def flip_a_bit(store: Store, step: int, kind: str = "safetensors") -> None:
    path = Path(store.path(f"step_{step:08d}.{kind}"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_all_ranks_read_the_newest_snapshot_whichever_node_has_it_on_disk_or_in_memory(
    tmp_path: Path,
) -> None:
    nodes = Nodes(tmp_path, 2)
    assert nodes.search()[0] == -1
    places = [nodes.disks[1], nodes.memories[0], nodes.disks[0], nodes.memories[1]]
    for step, store in enumerate(places, start=5):
        write_state(store, step)
        found, by_rank = nodes.search()
        assert (found, by_rank[1].where) == (step, store.url)
        node = [store in stores for stores in zip(nodes.disks, nodes.memories, strict=True)].index(True)
        held = [by_rank[1].is_held_by(rank) for rank in range(4)]
        assert held == [rank == 2 * node for rank in range(4)], "only the first worker of a node looks"
        assert by_rank[3].step_on_disk() == (7 if step >= 7 else 5)
        assert [by_rank[0].step_on_disk(rank) for rank in (1, 2)] == [-1, 5]
    assert nodes.search(nodes=[0])[0] == 7, "the other node is lost with its memory"


@pytest.mark.parametrize("bad", ["safetensors", "optimizer.safetensors", "json"])
def test_a_bad_snapshot_is_left_out_and_the_ranks_choose_again(bad: str, tmp_path: Path) -> None:
    """The bad bytes of tensors are noticed only when a chosen snapshot is read as a whole."""
    nodes = Nodes(tmp_path, 2)
    write_state(nodes.disks[0], 5)
    for store, step in ((nodes.memories[0], 10), (nodes.memories[1], 15), (nodes.disks[1], 20)):
        write_state(store, step)
        assert nodes.search()[0] == step
    for store, step in ((nodes.disks[1], 20), (nodes.memories[1], 15)):
        flip_a_bit(store, step, bad)
    step, by_rank = nodes.search()
    assert step == 10 and by_rank[0].where == nodes.memories[0].url
    for found in by_rank:
        assert list(found.corrupt(2)) == [20], "rank 2 may set it aside"
        assert found.corrupt(0) == {} and not found.unreadable()
        assert found.step_on_disk() == 5
    flip_a_bit(nodes.memories[0], 10, bad)
    assert nodes.search()[0] == 5
    flip_a_bit(nodes.disks[0], 5, bad)
    step, by_rank = nodes.search()
    assert step == -1 and [offer.step for offer in by_rank[1].on_disk() if offer.is_corrupt] == [20, 5]


def test_a_bad_snapshot_on_one_node_does_not_hide_the_same_step_on_another(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    for store in (nodes.disks[0], nodes.memories[1]):
        write_state(store, 5)
    flip_a_bit(nodes.disks[0], 5)
    step, by_rank = nodes.search()
    assert (step, by_rank[0].where) == (5, nodes.memories[1].url)
    assert [by_rank[0].is_held_by(rank) for rank in (0, 2)] == [False, True], "a damaged copy is none"


def test_a_snapshot_of_a_distrusted_generation_is_left_out_when_its_node_returns(tmp_path: Path) -> None:
    """A replay at step 20 found that a worker has computed wrongly since step 10, while the node was away."""
    nodes = Nodes(tmp_path, 2)

    def check(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
        if is_distrusted(manifest, [(10, 3)]):
            raise CorruptSnapshot("workers have computed differently since")

    write_state(nodes.disks[0], 10, generation=2)
    write_state(nodes.disks[1], 15, generation=2)
    write_state(nodes.memories[1], 18, generation=1)
    step, by_rank = nodes.search(check)
    assert step == 10
    assert by_rank[0].corrupt(2) == {15: "workers have computed differently since"}
    write_state(nodes.memories[0], 12, generation=3)
    assert nodes.search(check)[0] == 12


def test_what_was_saved_to_memory_after_a_snapshot_that_is_gone_counts_in_a_restart_only(
    tmp_path: Path,
) -> None:
    """A user who deletes snapshots wants to go back; a restart may have lost a node with them."""
    nodes = Nodes(tmp_path, 2)
    write_state(nodes.disks[1], 5)
    write_state(nodes.memories[0], 12, after=10)
    assert [nodes.search(is_restart=is_restart)[0] for is_restart in (True, False)] == [12, 5]
    write_state(nodes.disks[1], 10)
    flip_a_bit(nodes.disks[1], 10)
    assert nodes.search(is_restart=False)[0] == 12, "the snapshot on disk is damaged, and not gone"


def test_all_ranks_get_the_tokenizer_of_the_snapshot(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    tokenizer = {"kind": "json", "vocab_size": 11}
    write_state(nodes.memories[1], 5, b"the content of a tokenizer.json", tokenizer=tokenizer)
    nodes.search()
    assert nodes.tokenizers == {b"the content of a tokenizer.json"}


def test_a_tokenizer_that_the_manifest_does_not_tell_of_is_damage(tmp_path: Path) -> None:
    (disk,) = Nodes(tmp_path, 1).disks
    write_state(disk, 5)
    write_state(disk, 10, b"a tokenizer")
    found, state = search([disk], SingleProcess(), check_model)
    assert state and state.manifest.step == 5
    assert found.corrupt(0) == {10: "its manifest tells of no tokenizer, and there is one"}
