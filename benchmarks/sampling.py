"""Generating at 10.65 M parameters with the key/value cache, and with the whole window for every token.

    python benchmarks/sampling.py                                          # two minutes
    python benchmarks/sampling.py --rounds 1 --tokens 50 --recomputed 5    # seconds

In turns, on all cores, 1,000 tokens with the cache and 60 without. Exit code 1 unless the median of the
paired ratios is at least 5.
"""

import os
import sys
import time

import torch
from common import argument_parser, measure_in_turns, median_and_spread, paired, row

from mingpt.config import ModelConfig
from mingpt.model import GPT, generate_batch
from mingpt.model.gpt import choose

LEAST = 5


def cached_s(model: GPT, prompt: list[int], count: int) -> float:
    """Seconds per token."""
    began = time.perf_counter()
    written = len(list(generate_batch(model, prompt, count, [0])))
    return (time.perf_counter() - began) / written


@torch.inference_mode()
def recomputed_s(model: GPT, prompt: list[int], count: int) -> float:
    """Seconds per token, with the newest window of the context through the whole model for each."""
    generator, context = torch.Generator().manual_seed(0), list(prompt)
    began = time.perf_counter()
    for _ in range(count):
        logits, _ = model(torch.tensor([context[-model.block_size :]]))
        context.append(choose(logits[0, -1], 0.8, None, generator))
    return (time.perf_counter() - began) / count


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000, help="generated with the cache in each round")
    parser.add_argument("--recomputed", type=int, default=60, help="tokens generated without it")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    config = ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384)
    model = GPT(config, vocab_size=65, block_size=256).eval()
    prompt = [1] * 256  # a full window, as it is for most of the tokens
    variants = {
        "cached_s": lambda: cached_s(model, prompt, arguments.tokens),
        "recomputed_s": lambda: recomputed_s(model, prompt, arguments.recomputed),
    }
    found = measure_in_turns(variants, arguments.rounds)
    last = median_and_spread(paired(found, "recomputed_s", "cached_s"), 2)
    row(**last)
    return 0 if last["ratio"] >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
