"""What the compiler costs and saves: the constants of mingpt/model/compile.py.

    python benchmarks/compile_cost.py [--sizes default cpu 10M]

One thread, no workers. A row per size, as JSON: seconds of the first compilation with an empty cache, the
time of a micro-batch's forward and backward pass compiled over not compiled (median of rounds in turns), and
FLOP/s not compiled.
"""

import argparse
import copy
import functools
import os
import statistics
import sys
import tempfile
import time

import torch
from common import row, spread

from mingpt.config.cli import build
from mingpt.distributed.device import autocast, enable_determinism, resolve_dtype, tune_malloc
from mingpt.model import GPT, LossModule, compile_model, import_compiler
from mingpt.model.compile import Forward

CPU = {"model.arch": "gpt2", "model.n_layer": 4, "model.n_head": 4, "data.block_size": 64,
       "trainer.batch_size": 12, "trainer.micro_batch_size": 6}  # fmt: skip
BIG = {"model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.2,
       "trainer.batch_size": 64, "trainer.micro_batch_size": 8}  # fmt: skip
SIZES = {"default": {}, "cpu": CPU, "10M": BIG}


def step_s(forward: Forward, loss: LossModule, tokens: torch.Tensor, repeats: int) -> float:
    """Median seconds of a forward and a backward pass."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        with autocast(tokens.device, resolve_dtype("auto", tokens.device)):
            value = forward(tokens, tokens.roll(1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        loss.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(size: str, rounds: int) -> None:
    """Print the row of a size."""
    config = build(SIZES[size])
    shape = config.trainer.micro_batch_size, config.data.block_size
    tokens = torch.randint(65, shape)
    plain = LossModule(GPT(config.model, vocab_size=65, block_size=config.data.block_size))
    with torch.no_grad():
        for weight in plain.parameters():
            weight.normal_(std=0.02)
    loss = copy.deepcopy(plain)
    autocasts = functools.partial(autocast, tokens.device, resolve_dtype("auto", tokens.device))
    began = time.perf_counter()
    compiled, _ = compile_model(loss, tokens, autocasts)
    compile_s = time.perf_counter() - began
    assert compiled is not None, "the compiler failed"
    flops = plain.model.flops_per_token() * tokens.numel()
    repeats = max(3, int(2e10 / flops))
    ratios, rates = [], []
    for _ in range(rounds):
        eager_s = step_s(plain, plain, tokens, repeats)
        ratios.append(step_s(compiled, loss, tokens, repeats) / eager_s)
        rates.append(flops / eager_s / 1e9)
    ratio, rate = round(statistics.median(ratios), 3), round(statistics.median(rates))
    row(size=size, compile_s=round(compile_s, 1), gflops_per_s=rate, ratio=ratio, **spread(ratios, 3))


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tune_malloc(keeps_freed=True)
    enable_determinism()
    began = time.perf_counter()
    import_compiler()
    row(import_s=round(time.perf_counter() - began, 1))
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            measure(size, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
