"""The state of a run: a stored state is handed over in pieces, and each rank takes its rows of it."""

import pytest
import torch
from support.forks import results_of
from support.single_process import SingleProcess
from support.snapshots import make_manifest, snapshot_of
from support.states import make_state, shard_state
from support.training import Arch, Name, train
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext
from mingpt.snapshot import StoredState, search
from mingpt.snapshot.layout import lay_out
from mingpt.training.state import load_state

Tensors = dict[str, Tensor]


def make_stored(tensors: Tensors, reader: int = 0, rank: int = 0) -> StoredState:
    """A stored state as rank `rank` sees it; only rank `reader` has the snapshot and reads it."""
    snapshot = snapshot_of(make_manifest(7), tensors)
    layouts = [lay_out("", file.specs) for file in snapshot.tensor_files]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return StoredState(make_manifest(7), None, layouts, shapes, reader, snapshot if rank == reader else None)


def some_tensors() -> Tensors:
    """Tensors: a matrix, rows of several dimensions, a scalar, no rows, rows larger than a piece."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.matrix": torch.randn(9, 5, generator=generator),
        "model.deep": torch.randn(4, 2, 3, generator=generator),
        "optimizer.step": torch.tensor(3.0),
        "model.none": torch.empty(0, 4),
        "model.wide": torch.randn(3, 40, generator=generator),
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PIECE_BYTES", 64)


@pytest.mark.parametrize("reader", [0, 1])
def test_all_ranks_get_what_one_of_them_can_read(reader: int, small_pieces: None) -> None:
    tensors = some_tensors()

    def work(context: DistributedContext) -> Tensors:
        stored = make_stored(tensors, reader, context.rank)
        copied = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        stored.copy_into(copied, RowMap(stored.shapes), context.rank, context)
        return copied

    for copied in results_of(2, work):
        for name, tensor in copied.items():
            assert torch.equal(tensor, tensors[name]), name


def trained_tensors(name: Name, arch: Arch) -> Tensors:
    state = make_state(name, arch)
    train(state.model, state.optimizer, range(2))
    return {key: tensor.clone() for key, tensor in state.tensors().items()}


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_of_several_takes_its_rows(rank: int, weights_too: bool, small_pieces: None) -> None:
    tensors = trained_tensors("adamw", "gpt2")
    state = shard_state(rank, 3, weights_too)
    load_state(state, make_stored(tensors), SingleProcess())
    for name, part in state.tensors().items():
        rows = state.rows.by_rank(name)
        expected = tensors[name][rows[rank].start : rows[rank].stop] if rows else tensors[name]
        assert torch.equal(part, expected), name


def test_learned_positions_are_cut_to_the_block_size() -> None:
    """Positions beyond it are not needed."""
    tensors = trained_tensors("adamw", "gpt2")
    longer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    longer["model.wpe.weight"] = torch.cat([tensors["model.wpe.weight"], torch.ones(4, 16)])
    state = make_state("adamw", "gpt2")
    load_state(state, make_stored(longer), SingleProcess())
    assert torch.equal(state.tensors()["model.wpe.weight"], tensors["model.wpe.weight"])


@pytest.mark.parametrize("kind", ["another", "incomplete", "none"])
def test_the_state_of_another_optimizer_is_left_out(kind: str) -> None:
    tensors = trained_tensors("muon" if kind == "another" else "adamw", "gpt2")
    if kind == "incomplete":
        del tensors["optimizer.wte.weight.exp_avg"]
    elif kind == "none":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    state = make_state("adamw", "gpt2")
    load_state(state, make_stored(tensors), SingleProcess())
    after = state.tensors()
    for name, tensor in tensors.items():
        if name.startswith("model."):
            assert torch.equal(after[name], tensor)
    assert all(not after[name].any() for name in after if name.startswith("optimizer."))


@pytest.mark.parametrize(
    "change",
    [
        {"model.h.1.mlp.c_fc.weight": None},
        {"model.lm_head.weight": torch.ones(11, 16)},
        {"model.wte.weight": torch.ones(12, 16)},
        {"model.wpe.weight": torch.ones(5, 16)},
    ],
    ids=["missing", "more", "shape", "too few positions"],
)
def test_the_weights_of_another_model_are_refused(change: dict[str, Tensor | None]) -> None:
    """No weight is taken over."""
    changed = trained_tensors("adamw", "gpt2") | change
    stored = make_stored({name: tensor for name, tensor in changed.items() if tensor is not None})
    state = make_state("adamw", "gpt2")
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(UserError, match="the snapshot of step 7"):
        load_state(state, stored, SingleProcess())
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
