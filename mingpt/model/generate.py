"""Generation: one token after another, with a key/value cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mingpt.model.gpt import GPT


class Cache:
    """Keys and values of all positions so far, per block, in buffers of the model's context length."""

    def __init__(self, model: GPT, batch_size: int = 1) -> None:
        config, weight = model.config, model.wte.weight
        head_size = config.n_embd // config.n_head
        shape = (2, config.n_layer, batch_size, config.n_head, model.block_size, head_size)
        self.stored = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.last_block = config.n_layer - 1
        self.length = 0

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values; returns those of all positions, (B, H, length + T, D)."""
        end = self.length + key.size(2)
        for stored, new in zip(self.stored[:, block], (key, value), strict=True):
            stored[:, :, self.length : end] = new
        if block == self.last_block:
            self.length = end
        keys, values = self.stored[:, block, :, :, :end]
        return keys.to(key.dtype), values.to(key.dtype)


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token from (V,) logits; temperature 0 takes the most likely one."""
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits.float() - logits.max()) / temperature  # the largest is 0 at any temperature
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = float("-inf")
    return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))


@torch.no_grad()  # not inference_mode: FSDP2 goes on to train with tensors that it makes here
def generate(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    end: int | None = None,
) -> Iterator[int]:
    """Yield `count` tokens that continue `prompt`, which must hold at least one token.

    Fewer if `end` comes, which is not yielded. Only the first `vocab_size` tokens are drawn, where the
    embedding has more rows. The same seed gives the same tokens on the same device. When the cache's
    `block_size` positions are full, the newer half of the context is read into a fresh cache, so a token
    costs two positions on average.
    """
    was_training = model.training
    model.eval()
    device = model.wte.weight.device
    generator = torch.Generator().manual_seed(seed)
    context, cache = list(prompt)[-model.block_size :], Cache(model)
    unread = context
    try:
        for _ in range(count):
            if cache.length + len(unread) > model.block_size:
                unread, cache = context[-max(1, model.block_size // 2) :], Cache(model)
            logits, _ = model(torch.tensor([unread], device=device), cache=cache)
            unread = [choose(logits[0, -1, :vocab_size].cpu(), temperature, top_k, generator)]
            if unread[0] == end:
                return
            context = (context + unread)[-model.block_size :]
            yield unread[0]
    finally:
        model.train(was_training)
