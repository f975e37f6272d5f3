"""Small models for tests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mingpt.config import ModelConfig
from mingpt.model import GPT, generate_batch

Arch = Literal["gpt2", "modern"]
ARCHITECTURES: list[Arch] = ["gpt2", "modern"]
CONFIG = ModelConfig(n_layer=3, n_head=4, n_embd=48)


def make_model(
    arch: Arch, vocab_size: int = 31, block_size: int = 24, spread: bool = True, dropout: float = 0.0
) -> GPT:
    torch.manual_seed(0)
    config = replace(CONFIG, arch=arch, dropout=dropout)
    model = GPT(config, vocab_size=vocab_size, block_size=block_size)
    if spread:
        add_noise(model)
    return model.eval()


def add_noise(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)


def make_tokens(batch: int = 2, length: int = 24, vocab_size: int = 31) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: GPT, tokens: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The loss and every gradient; other random numbers are drawn between the two passes."""
    torch.manual_seed(9)  # for dropout
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens, tokens.roll(-1, 1))[1]
    assert loss is not None
    torch.manual_seed(10)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def generate(model: GPT, prompt: Sequence[int], count: int, seed: int = 0, **options: Any) -> Iterator[int]:
    for (token,) in generate_batch(model, prompt, count, [seed], **options):
        assert token is not None, "nothing follows the end"
        yield token
