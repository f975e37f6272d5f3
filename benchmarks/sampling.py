"""Generating at 10.65 M parameters with the key/value cache, and with the whole window for every token.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --rates [--rounds 3]

In turns, on all cores, 1,000 tokens with the cache and 60 without. Exit code 1 unless the median of the
paired ratios is at least 5.

With --rates: tokens/s of 1 and 16 samples at once, in float32 and bfloat16, at 10.65 M and 124 M parameters,
in turns. A step reads every weight once, for all samples: `bound` is the share that it reaches of the
bandwidth with which memory is read, measured before each round. It may pass 1 where weights fit into a cache.
"""

import argparse
import copy
import os
import statistics
import sys
import time

import torch
from common import row, spread

from mingpt.config import ModelConfig
from mingpt.model import GPT, generate
from mingpt.model.gpt import choose, generate_batch

MODELS = {  # n_layer, n_head, n_embd, vocab_size, block_size, tokens in a round
    "10M": (6, 6, 384, 65, 256, 60),
    "124M": (12, 12, 768, 50257, 1024, 12),
}
WARM_UP = 4  # tokens


@torch.inference_mode()
def recompute(model: GPT, prompt: list[int], count: int) -> None:
    """The newest window of the context through the whole model for each token."""
    generator, context = torch.Generator().manual_seed(0), list(prompt)
    for _ in range(count):
        logits, _ = model(torch.tensor([context[-model.block_size :]]))
        context.append(choose(logits[0, -1], 0.8, None, generator))


def read_rate() -> float:
    """Bytes per second of a sum over more than a cache holds, the best of several."""
    source, seconds = torch.ones(1 << 28), []
    for _ in range(5):
        began = time.perf_counter()
        source.sum()
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds)


def measure_rates(rounds: int) -> None:
    """Print a row per model, type and number of samples."""
    for name, (n_layer, n_head, n_embd, vocab_size, block_size, tokens) in MODELS.items():
        config = ModelConfig(arch="gpt2", n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        model = GPT(config, vocab_size=vocab_size, block_size=block_size)
        models = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
        step_s: dict[tuple[str, int], list[float]] = {(dtype, n): [] for dtype in models for n in (1, 16)}
        read = []
        for _ in range(rounds):
            read.append(read_rate())
            for (dtype, samples), seconds in step_s.items():
                steps = generate_batch(models[dtype], [1] * 64, WARM_UP + tokens, range(samples))
                for _ in range(WARM_UP):
                    next(steps)
                began = time.perf_counter()
                count = len(list(steps))
                seconds.append((time.perf_counter() - began) / count)
        for (dtype, samples), seconds in step_s.items():
            median = statistics.median(seconds)
            weights = sum(weight.nbytes for weight in models[dtype].parameters())
            bound = weights / median / statistics.median(read)
            rates = {"tokens_per_s": round(samples / median, 1), "read_gb_per_s": round(max(read) / 1e9, 1)}
            row(model=name, dtype=dtype, samples=samples, **rates, bound=round(bound, 3))


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000, help="generated with the cache in each round")
    parser.add_argument("--rates", action="store_true", help="of samples generated together, and of types")
    parser.add_argument("--recomputed", type=int, default=60, help="tokens generated without it")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    if arguments.rates:
        measure_rates(arguments.rounds)
        return 0
    config = ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384)
    model = GPT(config, vocab_size=65, block_size=256).eval()
    prompt = [1] * 256  # a full window, as it is for most of the tokens
    ratios = []
    for number in range(arguments.rounds):
        began = time.perf_counter()
        count = len(list(generate(model, prompt, arguments.tokens, seed=number)))
        cached_s = (time.perf_counter() - began) / count
        began = time.perf_counter()
        recompute(model, prompt, arguments.recomputed)
        recomputed_s = (time.perf_counter() - began) / arguments.recomputed
        ratios.append(recomputed_s / cached_s)
        row(
            round=number,
            cached_tokens_per_s=round(1 / cached_s, 1),
            recomputed_tokens_per_s=round(1 / recomputed_s, 1),
            ratio=round(ratios[-1], 2),
        )
    row(ratio=round(statistics.median(ratios), 2), **spread(ratios, 2))
    return 0 if statistics.median(ratios) >= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
