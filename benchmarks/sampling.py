"""Writing 1,000 tokens at 10.65 M parameters with the key/value cache, beside computing the whole window again for every token.

    python benchmarks/sampling.py

Both in turns, two threads. Exit code 1 unless the median of the paired ratios is at least 5.
"""

import os
import statistics
import sys
import time

import torch
from common import ROOT, row

sys.path.insert(0, str(ROOT))
from mingpt.config import ModelConfig
from mingpt.generate import choose, generate
from mingpt.model import GPT

TOKENS, RECOMPUTED = 1000, 60


@torch.inference_mode()
def recompute(model: GPT, prompt: list[int], count: int) -> None:
    """The newest window of the context through the whole model for each token."""
    generator, context = torch.Generator().manual_seed(0), list(prompt)
    for _ in range(count):
        logits, _ = model(torch.tensor([context[-model.block_size :]]))
        context.append(choose(logits[0, -1], 0.8, None, generator))


def main() -> int:
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = GPT(ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384), vocab_size=65, block_size=256).eval()
    prompt = [1] * 256  # a full window, as it is for most of the tokens
    ratios = []
    for number in range(5):
        began = time.perf_counter()
        written = len(list(generate(model, prompt, TOKENS, seed=number)))
        cached = (time.perf_counter() - began) / written
        began = time.perf_counter()
        recompute(model, prompt, RECOMPUTED)
        plain = (time.perf_counter() - began) / RECOMPUTED
        ratios.append(plain / cached)
        row(round=number, cached_tokens_per_s=round(1 / cached, 1), recomputed_tokens_per_s=round(1 / plain, 1), ratio=round(ratios[-1], 2))
    row(ratio=round(statistics.median(ratios), 2), **{"from": round(min(ratios), 2), "to": round(max(ratios), 2)})
    return 0 if statistics.median(ratios) >= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
