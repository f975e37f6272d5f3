"""Generation: one token after another, for several samples at once, with a key/value cache."""

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
    """Yield `count` tokens that continue `prompt`: `generate_batch` with one seed, fewer if `end` comes."""
    samples = generate_batch(
        model, prompt, count, [seed], temperature=temperature, top_k=top_k, vocab_size=vocab_size, end=end
    )
    for (token,) in samples:
        assert token is not None, "nothing follows the end"
        yield token


@torch.no_grad()  # not inference_mode: FSDP2 goes on to train with tensors that it makes here
def generate_batch(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    seeds: Sequence[int],
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    vocab_size: int | None = None,
    end: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield `count` times the next token of each sample, one sample per seed, that continues `prompt`.

    The prompt must hold at least one token. A sample's tokens are None from `end` on, and nothing is yielded
    when all have ended. Only the first `vocab_size` tokens are drawn, where the embedding has more rows. The
    same seeds give the same tokens on the same device; each sample has a random stream of its own, and other
    samples beside it change no more than the rounding of its logits. When the cache's `block_size` positions
    are full, the newer half of the context is read into a fresh cache, so a token costs two positions on
    average.
    """
    was_training = model.training
    model.eval()
    device = model.wte.weight.device
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    contexts = [list(prompt)[-model.block_size :] for _ in seeds]
    cache, unread = Cache(model, len(seeds)), contexts
    has_ended = [False for _ in seeds]
    try:
        for _ in range(count):
            if cache.length + len(unread[0]) > model.block_size:
                unread = [context[-max(1, model.block_size // 2) :] for context in contexts]
                cache = Cache(model, len(seeds))
            logits, _ = model(torch.tensor(unread, device=device), cache=cache)
            rows = logits[:, -1, :vocab_size].cpu()
            unread = [
                [choose(row, temperature, top_k, generator)]
                for row, generator in zip(rows, generators, strict=True)
            ]
            has_ended = [ended or token == end for ended, (token,) in zip(has_ended, unread, strict=True)]
            if all(has_ended):
                return
            contexts = [
                (context + new)[-model.block_size :] for context, new in zip(contexts, unread, strict=True)
            ]
            yield [None if ended else token for ended, (token,) in zip(has_ended, unread, strict=True)]
    finally:
        model.train(was_training)
