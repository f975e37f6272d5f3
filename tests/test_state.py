import pytest
import torch
from support.single_process import SingleProcess
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model, train

from mingpt.model import LossModule
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.state import TrainState
from mingpt.weights import load_weights


def make_state(name: Name, arch: Arch) -> TrainState:
    model, optimizer = make_model(name, arch)
    parameters = list(model.parameters())
    setup = StrategySetup(LossModule(model), parameters, [range(2)], (2, 8), SingleProcess(), False)
    return TrainState(model, optimizer, ExactReduction(setup))


def test_the_full_state_is_named_after_weights_and_optimizer_state() -> None:
    state = make_state("muon", "modern")
    full = state.full_state()
    weights = dict(state.model.named_parameters())
    assert {name for name in full if name.startswith("model.")} == {f"model.{name}" for name in weights}
    assert "optimizer.h.0.attn.c_attn.weight.momentum_buffer" in full
    assert "optimizer.lm_head.weight.exp_avg_sq" in full
    assert all(name.startswith(("model.", "optimizer.")) for name in full)
    assert len(full) == len(weights) + len(state.optimizer.state_dict())


def test_the_full_state_holds_values_and_no_graph() -> None:
    state = make_state("adamw", "gpt2")
    train(state.model, state.optimizer, range(1))
    full = state.full_state()
    assert not any(tensor.requires_grad for tensor in full.values())
    assert torch.equal(full["model.wte.weight"], state.model.wte.weight)
    assert full["optimizer.wte.weight.step"] == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_loaded_goes_on_with_the_same_bits(name: Name, arch: Arch) -> None:
    whole = make_state(name, arch)
    train(whole.model, whole.optimizer, range(6))
    first = make_state(name, arch)
    train(first.model, first.optimizer, range(3))
    saved = {key: tensor.clone() for key, tensor in first.full_state().items()}
    second = make_state(name, arch)
    load_weights(second.model, part_of(saved, "model."), "the first one")
    second.load_optimizer(part_of(saved, "optimizer."))
    train(second.model, second.optimizer, range(3, 6))
    for expected, weight in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(expected, weight)


def part_of(full: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    named = {name: tensor for name, tensor in full.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def test_a_tensor_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"exp_avg"):
        make_state("adamw", "gpt2").load_optimizer({"wte.weight.step": torch.zeros(())})


def test_a_step_counts_itself_and_its_windows() -> None:
    state = make_state("adamw", "gpt2")
    state.advance(8)
    state.advance(8)
    assert (state.step, state.windows_seen) == (2, 16)
