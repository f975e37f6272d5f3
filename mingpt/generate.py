"""Writing: one token after another, with a key/value cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mingpt.model import GPT


class Cache:
    """Keys and values of every position so far, per block, in buffers as long as the model's context."""

    def __init__(self, model: GPT, batch_size: int = 1) -> None:
        config = model.config
        shape = (2, config.n_layer, batch_size, config.n_head, model.block_size, config.n_embd // config.n_head)
        self.stored = torch.zeros(shape, device=model.wte.weight.device, dtype=model.wte.weight.dtype)
        self.last_block = config.n_layer - 1
        self.length = 0

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) keys and values behind those of the earlier calls; returns all of them, (B, H, length + T, D)."""
        end = self.length + key.size(2)
        for stored, new in zip(self.stored[:, block], (key, value), strict=True):
            stored[:, :, self.length : end] = new
        if block == self.last_block:
            self.length = end
        return self.stored[0, block, :, :, :end].to(key.dtype), self.stored[1, block, :, :, :end].to(key.dtype)


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token from (V,) logits; temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits.float() - logits.max()) / temperature  # so that no temperature makes infinity of the largest
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = float("-inf")
    return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))


@torch.inference_mode()
def generate(model: GPT, prompt: Sequence[int], count: int, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0) -> Iterator[int]:
    """Yield `count` tokens that follow `prompt`, which must hold at least one. The same seed gives the same tokens on the same device.

    The cache holds `block_size` positions. When it is full, the newer half of the context is read again from the start of a fresh one,
    so a token costs one position on average two, however long the text becomes.
    """
    was_training = model.training
    model.eval()
    device = model.wte.weight.device
    generator = torch.Generator().manual_seed(seed)
    context, cache = list(prompt)[-model.block_size :], Cache(model)
    unread = context
    for _ in range(count):
        if cache.length + len(unread) > model.block_size:
            unread, cache = context[-max(1, model.block_size // 2) :], Cache(model)
        logits, _ = model(torch.tensor([unread], device=device), cache=cache)
        unread = [choose(logits[0, -1].cpu(), temperature, top_k, generator)]
        context = (context + unread)[-model.block_size :]
        yield unread[0]
    model.train(was_training)
