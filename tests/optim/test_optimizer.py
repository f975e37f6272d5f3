import pytest
import torch
from support.training import ARCHITECTURES, NAMES, Arch, Name, compute_gradients, gradients_of, make_model

from mingpt.config import OptimizerConfig
from mingpt.optim import state_shapes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(arch: Arch) -> None:
    """As torch's, as far as its products of one matrix and ours of a batch agree in bfloat16."""
    model, optimizer = make_model("muon", arch)
    theirs, _ = make_model("muon", arch)
    config = OptimizerConfig(name="muon")
    named = dict(theirs.named_parameters())
    hidden = {key: weight for key, weight in named.items() if key.startswith("h.") and weight.ndim == 2}
    rest = [weight for key, weight in named.items() if key not in hidden]
    groups = [
        {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), fused=True)
    muon = torch.optim.Muon(
        list(hidden.values()),
        lr=0.01,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(4):
        compute_gradients(model, step)
        compute_gradients(theirs, step)
        optimizer.step(0.01, gradients_of(model))
        adamw.step()
        muon.step()
        model.zero_grad()
        theirs.zero_grad()
    assert len(hidden) == 8
    for key, mine in model.named_parameters():
        torch.testing.assert_close(mine, named[key], rtol=0, atol=2e-3, msg=key)


@pytest.mark.parametrize(
    ("name", "states"), [("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("muon", {"momentum_buffer"})]
)
def test_the_state_is_named_after_the_parameters(name: Name, states: set[str]) -> None:
    model, optimizer = make_model(name, "modern")
    state = optimizer.state_dict()
    matrix = "h.0.attn.c_attn.weight"
    assert {key.removeprefix(matrix + ".") for key in state if key.startswith(matrix)} == states
    assert {key.rpartition(".")[0] for key in state} == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shapes_of_the_state_are_known_without_the_optimizer(name: Name, arch: Arch) -> None:
    model, optimizer = make_model(name, arch)
    parameters = {key: tuple(weight.shape) for key, weight in model.named_parameters()}
    expected = {key: tuple(tensor.shape) for key, tensor in optimizer.state_dict().items()}
    assert state_shapes(parameters, OptimizerConfig(name=name)) == expected
