import pytest
import torch
from support.training import ARCHITECTURES, Arch, compute_gradients, make_model
from torch import nn

from mingpt.config import OptimizerConfig
from mingpt.optim import AdamW


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_updates_are_those_of_torch_to_the_bit(arch: Arch) -> None:
    """With decay for matrices alone."""
    model, optimizer = make_model("adamw", arch)
    theirs, _ = make_model("adamw", arch)
    config = OptimizerConfig(name="adamw")
    decaying = [weight for weight in theirs.parameters() if weight.ndim >= 2]
    others = [weight for weight in theirs.parameters() if weight.ndim < 2]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), fused=True)
    for step in range(4):
        compute_gradients(model, step)
        compute_gradients(theirs, step)
        optimizer.step(0.01)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for (key, mine), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=key)


def test_a_weight_without_a_gradient_is_an_error() -> None:
    optimizer = AdamW({"w": nn.Parameter(torch.ones(3))}, OptimizerConfig())
    with pytest.raises(AssertionError, match="every parameter takes part in every step"):
        optimizer.step(0.01)
