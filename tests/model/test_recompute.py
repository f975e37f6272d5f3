"""Activation checkpointing: the same bits, fewer activations."""

from dataclasses import replace

import pytest
import torch
from support.models import ARCHITECTURES, CONFIG, Arch, make_tokens
from torch import Tensor

from mingpt.extras.cpu_ops import MAX_MATH_ATTENTION
from mingpt.model import GPT

LENGTHS = [40, MAX_MATH_ATTENTION + 8]  # attention written out, and attention of the library


def make_model(arch: Arch, length: int) -> GPT:
    model = GPT(replace(CONFIG, arch=arch, dropout=0.2), vocab_size=31, block_size=length)
    model.init_weights(3)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return model.train()


def gradients(model: GPT, length: int, bf16: bool) -> list[Tensor]:
    """The loss and every gradient; other random numbers are drawn between the two passes."""
    tokens = make_tokens(1, length)
    torch.manual_seed(9)  # for dropout
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model(tokens, tokens.roll(-1, 1))[1]
    assert loss is not None
    torch.manual_seed(10)
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_gradients_have_the_same_bits(arch: Arch, bf16: bool, length: int) -> None:
    model = make_model(arch, length)
    kept = gradients(model, length, bf16)
    model.set_recompute(True)
    recomputed = gradients(model, length, bf16)
    assert len(kept) == len(recomputed) == 1 + len(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
