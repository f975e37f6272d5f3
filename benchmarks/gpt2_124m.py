"""GPT-2 124M on random tokens: tokens per second and the share of the device's peak. Made for a GPU; `--device cpu --steps 2` shows that it runs.

    python benchmarks/gpt2_124m.py                     # vocabulary of 50,257, block 1024, bfloat16, compiled

Model, optimizer and clipping are the trainer's; there is no data to read and nothing to save. Two rows, eager and compiled, as JSON.
"""

import argparse
import statistics
import sys
import time

import torch
from common import ROOT, row

sys.path.insert(0, str(ROOT))
from mingpt.compiler import compiled
from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.metrics import peak_flops
from mingpt.model import GPT, Loss
from mingpt.optim import Optimizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16, help="windows in a forward and backward pass")
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = GPT(ModelConfig(arch="gpt2", n_layer=12, n_head=12, n_embd=768), vocab_size=50257, block_size=arguments.block).to(device)
    optimizer = Optimizer(model, OptimizerConfig(name="adamw"))
    tokens = torch.randint(0, 50257, (arguments.batch, arguments.block + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    for kind in ("eager", "compiled"):
        forward = compiled(Loss(model), inputs, autocast)[0] if kind == "compiled" else Loss(model)
        if forward is None:
            return 1
        times = []
        for _ in range(arguments.steps):
            began = time.perf_counter()
            with autocast():
                loss = forward(inputs, targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(6e-4)
            optimizer.zero_grad()
            float(norm)  # waits for the device, as the trainer does
            times.append(time.perf_counter() - began)
        step_s = statistics.median(times[len(times) // 3 :])
        rate, peak = inputs.numel() / step_s, peak_flops(name)
        share = round(model.flops_per_token() * rate / peak, 3) if peak else None
        row(
            kind=kind,
            device=name,
            torch=str(torch.__version__),
            batch=arguments.batch,
            step_s=round(step_s, 5),
            tokens_per_s=round(rate),
            of_peak=share,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
