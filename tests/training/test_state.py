import pytest
import torch
from support.states import make_state, shard_state
from support.training import ARCHITECTURES, NAMES, Arch, Name, train

from mingpt.training.state import copy_rows


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_the_shapes_are_those_of_the_whole_tensors(name: Name, arch: Arch) -> None:
    """One rank has whole ones; the state of AdamW has a scalar per parameter."""
    state = make_state(name, arch)
    assert state.shapes() == {key: tuple(tensor.shape) for key, tensor in state.tensors().items()}
    assert state.shapes()["optimizer.wte.weight.step"] == ()
    assert set(state.first_rows().values()) == {0}
    assert {state.rows_by_rank(key, shape) for key, shape in state.shapes().items()} == {None}


def test_the_state_holds_values_and_no_graph_and_no_copies() -> None:
    state = make_state("adamw", "gpt2")
    train(state.model, state.optimizer, range(1))
    tensors = state.tensors()
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert tensors["model.wte.weight"].data_ptr() == state.model.wte.weight.data_ptr()
    assert tensors["optimizer.wte.weight.step"] == 1


@pytest.mark.parametrize("weights_too", [False, True])
def test_a_rank_knows_which_rows_of_which_tensors_each_holds(weights_too: bool) -> None:
    """wte has 11 rows, wpe 8, over 3 ranks."""
    states = [shard_state(rank, 3, weights_too) for rank in range(3)]
    for rank, state in enumerate(states):
        shapes, first = state.shapes(), state.first_rows()
        assert shapes == make_state("adamw", "gpt2").shapes()
        for name, part in state.tensors().items():
            rows = state.rows_by_rank(name, shapes[name])
            is_whole = name.endswith(".step") or (name.startswith("model.") and not weights_too)
            assert (rows is None) == is_whole
            held = range(shapes[name][0] if shapes[name] else 0) if rows is None else rows[rank]
            assert first[name] == held.start
            assert tuple(part.shape) == (len(held), *shapes[name][1:]) if shapes[name] else part.ndim == 0
        assert first["optimizer.wte.weight.exp_avg"] == 4 * rank
    rows = states[0].rows_by_rank("optimizer.wpe.weight.exp_avg", (8, 16))
    assert rows == [range(3), range(3, 6), range(6, 8)]


@pytest.mark.parametrize("columns", [(), (3,), (2, 2)])
def test_rows_are_copied_as_far_as_a_part_has_them(columns: tuple[int, ...]) -> None:
    """Against one row after the other: parts and pieces of every place, none among them."""
    whole = torch.arange(7 * torch.Size(columns).numel()).view(7, *columns)
    for first in range(7):
        for end in range(first, 8):
            for begin in range(7):
                for stop in range(begin, 8):
                    part = torch.full((end - first, *columns), -1)
                    expected = part.clone()
                    for row in set(range(first, end)) & set(range(begin, stop)):
                        expected[row - first] = whole[row]
                    copy_rows(part, first, begin, whole[begin:stop])
                    assert torch.equal(part, expected)
