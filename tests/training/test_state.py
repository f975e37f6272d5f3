import pytest
import torch
from support.states import make_state, shard_state
from support.training import ARCHITECTURES, NAMES, Arch, Name, train
from torch import Tensor

from mingpt.training.state import copy_rows


def test_the_state_is_named_after_weights_and_optimizer_state() -> None:
    state = make_state("muon", "modern")
    tensors = state.tensors()
    weights = dict(state.model.named_parameters())
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in weights}
    assert "optimizer.h.0.attn.c_attn.weight.momentum_buffer" in tensors
    assert "optimizer.lm_head.weight.exp_avg_sq" in tensors
    assert all(name.startswith(("model.", "optimizer.")) for name in tensors)
    assert len(tensors) == len(weights) + len(state.optimizer.state_dict())


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_copied_goes_on_with_the_same_bits(name: Name, arch: Arch) -> None:
    whole = make_state(name, arch)
    train(whole.model, whole.optimizer, range(6))
    first = make_state(name, arch)
    train(first.model, first.optimizer, range(3))
    saved = {key: tensor.clone() for key, tensor in first.tensors().items()}
    second = make_state(name, arch)
    parts = second.tensors()
    for key, tensor in saved.items():
        copy_rows(parts[key], 0, 0, tensor)
    train(second.model, second.optimizer, range(3, 6))
    for expected, weight in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(expected, weight)


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


def test_a_step_counts_itself_and_its_windows() -> None:
    state = make_state("adamw", "gpt2")
    state.advance(8)
    state.advance(8)
    assert (state.step, state.windows_seen) == (2, 16)


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


@pytest.mark.parametrize("rows", [torch.tensor(5.0), torch.tensor([5.0])])
def test_a_scalar_is_one_row(rows: Tensor) -> None:
    part = torch.tensor(0.0)
    copy_rows(part, 0, 0, rows)
    assert part.shape == () and part == 5.0


def test_rows_are_copied_into_weights_that_need_a_gradient() -> None:
    part = torch.nn.Parameter(torch.zeros(2, 2))
    copy_rows(part, 0, 1, torch.ones(3, 2))
    assert part.tolist() == [[0.0, 0.0], [1.0, 1.0]]
