"""The search for the newest snapshot on disk or in memory; nodes are folders, ranks threads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.ranks import run_ranks
from support.snapshots import make_manifest, search, write
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import Config, DataConfig, ModelConfig, to_dict
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Found, Manifest, Store, StoredState
from mingpt.snapshot.search import Offer, choose
from mingpt.training.contents import check_model, tensor_shapes

CONFIG = Config(
    data=DataConfig(block_size=7), model=ModelConfig(n_layer=1, n_head=1, n_embd=8, arch="modern")
)
# Fields of each manifest.
FIELDS: dict[str, Any] = {"config": to_dict(CONFIG), "tokenizer": {"kind": "none", "vocab_size": 11}}
SHAPES = tensor_shapes(CONFIG, 11)


def make_state(step: int) -> dict[str, Tensor]:
    """Return tensors by name, each with the elements `step`, `step` + 1, `step` + 2 and so on."""
    return {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) + step
        for name, shape in SHAPES.items()
    }


def check_values(found: StoredState, context: DistributedContext) -> int:
    step = found.manifest.step
    expected = make_state(step)
    assert found.shapes == SHAPES
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found.copy_into(values, RowMap(SHAPES), context.rank, context)
    for name in SHAPES:
        assert torch.equal(values[name], expected[name]), name
    return step


def make_offer(reader: int, store: int, step: int, fault: str, manifest: Manifest | None) -> Offer:
    """An offer of one of three ranks, each of which has a disk (Store 0) and two Stores in memory."""
    return Offer(step, store == 0, "here", reader, store, manifest, fault)


OFFERS = st.builds(
    make_offer,
    reader=st.integers(0, 2),
    store=st.integers(0, 2),
    step=st.integers(-1, 4),
    fault=st.sampled_from(["", "", "damaged"]),
    manifest=st.sampled_from([None, *(make_manifest(5, after=after) for after in (0, 3, 5))]),
)


@examples(100)
@given(
    st.lists(OFFERS, max_size=8, unique_by=lambda one: (one.reader, one.store, one.step)),
    st.none() | st.integers(0, 5),
)
def test_the_newest_snapshot_without_a_fault_is_chosen_whatever_the_order_of_the_offers(
    offers: list[Offer], newest_on_disk: int | None
) -> None:
    """A snapshot on disk comes before one of the same step in memory, and then that of the lowest rank.

    One in memory does not count if it was saved after a snapshot on disk that is gone.
    """
    choice = choose(offers, newest_on_disk)
    assert choice is None or choice in offers
    for one in offers:
        is_later = newest_on_disk is not None and one.after > newest_on_disk
        if one.fault or (is_later and not one.is_on_disk):
            assert one != choice
        elif one != choice:
            assert choice and (choice.step, choice.is_on_disk) >= (one.step, one.is_on_disk)
            is_equal = (choice.step, choice.is_on_disk) == (one.step, one.is_on_disk)
            assert not is_equal or (choice.reader, choice.store) < (one.reader, one.store)


class Nodes:
    def __init__(self, folder: Path) -> None:
        self.disks, self.memories = (
            [Store(str(folder / f"{kind}{node}"), retries_s=()) for node in range(2)]
            for kind in ("disk", "memory")
        )
        for store in (*self.disks, *self.memories):
            store.prepare()

    def search(self, *nodes: int) -> tuple[int, list[Found]]:
        """Search with two workers on each of `nodes` (by default all); return the step, and what each finds.

        The step is -1 if there is no snapshot. The values and the tokenizer on all ranks are checked.
        """
        present = nodes or (0, 1)

        def work(context: DistributedContext) -> tuple[int, Found]:
            node, local_rank = present[context.rank // 2], context.rank % 2
            context.launch = replace(context.launch, node_rank=node, local_rank=local_rank)
            found, state = search([self.disks[node], self.memories[node]], context, check_model)
            assert state is None or state.tokenizer == TOKENIZER
            return check_values(state, context) if state else -1, found

        results = run_ranks(2 * len(present), work)
        for result in results:
            if isinstance(result, Exception):
                raise result
        (step,) = {result[0] for result in results}  # type: ignore[index]
        return step, [result[1] for result in results]  # type: ignore[index]


TOKENIZER = b"the content of a tokenizer.json"


def write_state(store: Store, step: int) -> None:
    manifest = make_manifest(step, **FIELDS | {"tokenizer": {"kind": "json", "vocab_size": 11}})
    write(store, manifest, make_state(step), TOKENIZER)


def flip_a_bit(store: Store, step: int, kind: str = "safetensors") -> None:
    path = Path(store.path(f"step_{step:08d}.{kind}"))
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


@pytest.mark.parametrize("bad", ["safetensors", "optimizer.safetensors", "json"])
def test_all_ranks_read_the_newest_good_snapshot_whichever_node_has_it_on_disk_or_in_memory(
    bad: str, tmp_path: Path
) -> None:
    """The bad bytes of tensors are noticed only when a chosen snapshot is read as a whole."""
    nodes = Nodes(tmp_path)
    assert nodes.search()[0] == -1
    places = [(nodes.memories[1], 5), (nodes.disks[0], 5), (nodes.memories[0], 10), (nodes.memories[1], 15)]
    for store, step in [*places, (nodes.disks[1], 20)]:
        write_state(store, step)
        found, by_rank = nodes.search()
        assert (found, by_rank[1].where) == (step, store.url)
    assert nodes.search(0)[0] == 10, "the other node is lost with its memory"
    flip_a_bit(nodes.disks[1], 20, bad)
    flip_a_bit(nodes.memories[1], 15, bad)
    step, by_rank = nodes.search()
    assert step == 10 and by_rank[0].where == nodes.memories[0].url
    for found_by in by_rank:
        assert list(found_by.corrupt(2)) == [20], "rank 2 may set it aside"
        assert (found_by.corrupt(0), found_by.unreadable(), found_by.step_on_disk()) == ({}, [], 5)
    flip_a_bit(nodes.memories[0], 10, bad)
    flip_a_bit(nodes.disks[0], 5, bad)
    step, by_rank = nodes.search()
    assert (step, by_rank[0].where) == (5, nodes.memories[1].url), "the same step is good on another node"
    flip_a_bit(nodes.memories[1], 5, bad)
    step, by_rank = nodes.search()
    assert step == -1 and [offer.step for offer in by_rank[1].on_disk() if offer.is_corrupt] == [20, 5]
