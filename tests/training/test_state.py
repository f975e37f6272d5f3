"""The state of a run: a stored state is handed over in pieces, and each rank takes its rows of it."""

import pytest
import torch
from support.golden import Golden
from support.ranks import run_ranks
from support.single_process import SingleProcess
from support.snapshots import make_manifest, snapshot_of
from support.states import make_state, shard_state
from support.training import Name, train
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.distributed import DistributedContext
from mingpt.snapshot import StoredState, search
from mingpt.snapshot.layout import lay_out
from mingpt.training.state import TrainState, load_state

Tensors = dict[str, Tensor]


def make_stored(tensors: Tensors, reader: int = 0, rank: int = 0) -> StoredState:
    """A stored state as rank `rank` sees it; only rank `reader` has the snapshot and reads it."""
    snapshot = snapshot_of(make_manifest(7), tensors)
    layouts = [lay_out("", file.specs) for file in snapshot.tensor_files]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return StoredState(make_manifest(7), None, layouts, shapes, reader, snapshot if rank == reader else None)


def trained_tensors(name: Name = "adamw") -> Tensors:
    state = make_state(name, "gpt2")
    train(state.model, state.optimizer, range(2))
    return {key: tensor.clone() for key, tensor in state.tensors().items()}


def loaded(tensors: Tensors) -> Tensors:
    """The tensors of a new state into which these are loaded."""
    state = make_state("adamw", "gpt2")
    load_state(state, make_stored(tensors), SingleProcess())
    return state.tensors()


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("reader", [0, 2])
def test_all_ranks_get_their_rows_of_what_one_of_them_can_read(
    reader: int, weights_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PIECE_BYTES", 200)  # some rows are larger
    tensors = trained_tensors()

    def work(context: DistributedContext) -> TrainState:
        state = shard_state(context.rank, 3, weights_too)
        load_state(state, make_stored(tensors, reader, context.rank), context)
        return state

    for rank, state in enumerate(run_ranks(3, work)):
        assert isinstance(state, TrainState), state
        for name, part in state.tensors().items():
            rows = state.rows.by_rank(name)
            expected = tensors[name][rows[rank].start : rows[rank].stop] if rows else tensors[name]
            assert torch.equal(part, expected), name


def test_learned_positions_are_cut_to_the_block_size() -> None:
    """Positions beyond it are not needed."""
    tensors = trained_tensors()
    name = "model.wpe.weight"
    found = loaded(tensors | {name: torch.cat([tensors[name], torch.ones(4, 16)])})
    assert torch.equal(found[name], tensors[name])


@pytest.mark.parametrize("kind", ["another", "incomplete", "none"])
def test_the_state_of_another_optimizer_is_left_out(kind: str) -> None:
    tensors = trained_tensors("muon" if kind == "another" else "adamw")
    if kind == "incomplete":
        del tensors["optimizer.wte.weight.exp_avg"]
    elif kind == "none":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    for name, tensor in loaded(tensors).items():
        expected = tensors[name] if name.startswith("model.") else torch.zeros_like(tensor)
        assert torch.equal(tensor, expected), name


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
def test_the_weights_of_another_model_are_refused(change: dict[str, Tensor | None], golden: Golden) -> None:
    """No weight is taken over."""
    changed = trained_tensors() | change
    stored = make_stored({name: tensor for name, tensor in changed.items() if tensor is not None})
    state, before = make_state("adamw", "gpt2"), make_state("adamw", "gpt2").tensors()
    with pytest.raises(UserError) as error:
        load_state(state, stored, SingleProcess())
    golden(str(error.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
