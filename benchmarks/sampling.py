"""Generating at 10.65 M parameters with the key/value cache, and with the whole window for every token.

    python benchmarks/sampling.py

In turns, on all cores, 1,000 tokens with the cache and 60 without. Exit code 1 unless the median of the
paired ratios is at least 5.
"""

import argparse
import os
import statistics
import sys
import time

import torch
from common import row, spread

from mingpt.config import ModelConfig
from mingpt.model import GPT, generate
from mingpt.model.generate import choose


@torch.inference_mode()
def recompute(model: GPT, prompt: list[int], count: int) -> None:
    """The newest window of the context through the whole model for each token."""
    generator, context = torch.Generator().manual_seed(0), list(prompt)
    for _ in range(count):
        logits, _ = model(torch.tensor([context[-model.block_size :]]))
        context.append(choose(logits[0, -1], 0.8, None, generator))


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000, help="generated with the cache in each round")
    parser.add_argument("--recomputed", type=int, default=60, help="tokens generated without it")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
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
