"""GPT-2 124M on random tokens: tokens per second and the fraction of the device's peak.

    python benchmarks/gpt2_124m.py                      # on a GPU: vocabulary of 50,257, block 1024, bfloat16
    python benchmarks/gpt2_124m.py --device cpu --steps 2 --batch 1 --block 64      # shows that it runs

Model, optimizer and clipping are the trainer's; there is no data to read and nothing to save. Two rows, eager
and compiled, as JSON. Exit code 1 if the compiler fails.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from common import row
from torch import Tensor

from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.distributed.device import autocast
from mingpt.model import GPT, LossModule, compile_model
from mingpt.optim import Optimizer
from mingpt.report.metrics import peak_flops

VOCABULARY, LEARNING_RATE, GRAD_CLIP = 50257, 6e-4, 1.0


def step_times(
    model: GPT,
    optimizer: Optimizer,
    forward: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    steps: int,
) -> list[float]:
    """Seconds of each step over (B, T + 1) tokens."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        with autocast(tokens.device, torch.bfloat16):
            loss = forward(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        gradients = {
            name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
        }
        optimizer.step(LEARNING_RATE, gradients)
        model.zero_grad(set_to_none=True)
        float(grad_norm)  # waits for the device, as the trainer does
        times.append(time.perf_counter() - began)
    return times


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16, help="windows in a forward and backward pass")
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    device, batch = torch.device(arguments.device), arguments.batch
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    config = ModelConfig(arch="gpt2", n_layer=12, n_head=12, n_embd=768)
    model = GPT(config, vocab_size=VOCABULARY, block_size=arguments.block).to(device)
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    optimizer = Optimizer(weights, shapes, OptimizerConfig(name="adamw"))
    tokens = torch.randint(0, VOCABULARY, (batch, arguments.block + 1), device=device)
    peak = peak_flops(device_name)
    for kind in ("eager", "compiled"):
        forward: Callable[[Tensor, Tensor], Tensor] | None = LossModule(model)
        if kind == "compiled":
            example = tokens[:, :-1].contiguous()
            autocasts = functools.partial(autocast, device, torch.bfloat16)
            forward, _ = compile_model(LossModule(model), example, autocasts)
        if forward is None:
            return 1
        times = step_times(model, optimizer, forward, tokens, arguments.steps)
        step_s = statistics.median(times[len(times) // 3 :])
        rate = batch * arguments.block / step_s
        share = round(model.flops_per_token() * rate / peak, 3) if peak else None
        about = {"kind": kind, "device": device_name, "torch": str(torch.__version__), "batch": batch}
        row(**about, step_s=round(step_s, 5), tokens_per_s=round(rate), of_peak=share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
