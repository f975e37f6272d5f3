"""Where a step's time goes: steps and tokens per second, the share of the measured rate of matrix products, and of each part of a step.

    python benchmarks/throughput.py                        # default run, nanoGPT's CPU size, 10.65 M parameters, each compiled too; two workers
    python benchmarks/throughput.py --sizes 10M --workers 1

A row a size, as JSON, then a table. `products` is what the arithmetic of a step would take at the rate measured for large products, over what
the step took. On a GPU the same command measures there (`--workers 1 trainer.device=cuda`); the shares of forward and backward are then those of
their launches.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, row

CPU = {"model.arch": "gpt2", "model.n_layer": 4, "model.n_head": 4, "model.n_embd": 128, "data.block_size": 64, "trainer.batch_size": 12,
       "trainer.micro_batch_size": 6, "optimizer.name": "adamw", "optimizer.learning_rate": 0.001, "trainer.max_steps": 200}  # fmt: skip
BIG = {"model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.2, "trainer.batch_size": 64,
       "trainer.micro_batch_size": 8, "optimizer.name": "adamw", "optimizer.learning_rate": 0.001, "trainer.max_steps": 6}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "default": {"trainer.max_steps": 60},
    "cpu": CPU,
    "10M": BIG,
    "10M-no-dropout": BIG | {"model.dropout": 0.0},
}  # fmt: skip
SIZES |= {f"{size}, compiled": settings | {"trainer.compile": True} for size, settings in SIZES.items()}
QUIET = {"trainer.eval_every": 10**6, "trainer.sample_tokens": 0, "trainer.log_every": 10**6, "data.val_fraction": 0.01}
PARTS = ("data", "forward", "backward", "reduction", "optimizer", "snapshot")


def product_rate(device: str, threads: int) -> float:
    """FLOP/s of a large bfloat16 product."""
    import torch

    torch.set_num_threads(threads)
    size = 8192 if device.startswith("cuda") else 2048
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for it
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def worker(argv: list[str]) -> None:
    """train.py, with a trainer that keeps the time of each part."""
    sys.path.insert(0, str(ROOT))
    import torch

    from mingpt.config import Config, build
    from mingpt.job import work
    from mingpt.trainer import Trainer

    spent: dict[str, float] = collections.defaultdict(float)
    steps: list[float] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - began

        return run

    class Timed(Trainer):
        def __init__(self, config: Config, cluster: Any) -> None:
            super().__init__(config, cluster)
            self.forward = timed("forward", self.forward)
            self.optimizer.step = timed("optimizer", self.optimizer.step)  # type: ignore[method-assign]
            if self.tree:
                self.tree.finish = timed("reduction", self.tree.finish)  # type: ignore[method-assign]
            self.accumulate = timed("accumulate", self.accumulate)  # type: ignore[method-assign]

        def step(self) -> tuple[float, str | None]:
            if self.steps == self.warm:
                spent.clear()
            began, fetched = time.perf_counter(), self.data_s
            result = super().step()
            steps.append(time.perf_counter() - began)
            spent["data"] += self.data_s - fetched
            return result

        def save(self) -> None:
            timed("snapshot", super().save)()

        def save_in_memory(self) -> None:
            timed("snapshot", super().save_in_memory)()

        def run(self) -> str | None:
            self.warm = max(1, self.config.trainer.max_steps // 4)
            stopped = super().run()
            if self.report:
                measured = steps[self.warm :]
                parts = {part: spent[part] / len(measured) for part in PARTS}
                parts |= {"backward": (spent["accumulate"] - spent["forward"]) / len(measured)}
                tokens = self.config.trainer.batch_size * self.config.data.block_size
                about: dict[str, Any] = {"parameters": sum(weight.numel() for weight in self.model.parameters()), "tokens_per_step": tokens}
                about |= {
                    "compiled": self.software["compiled"],
                    "flops_per_step": self.model.flops_per_token() * tokens,
                    "torch": torch.__version__,
                    "device": self.software["device"],
                }
                sys.stdout.write(json.dumps(about | {"steps": measured, "parts": parts}) + "\n")
                sys.stdout.flush()
            return stopped

    work(lambda: build(dict(word.split("=", 1) for word in argv)), Timed)


def measure(settings: dict[str, Any], workers: int, extra: list[str]) -> dict[str, Any]:
    """One run; what rank 0 kept of it."""
    with tempfile.TemporaryDirectory() as name:
        given = [f"{key}={value}" for key, value in (QUIET | settings | {"run_dir": Path(name, "run")}).items()]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", __file__, "--worker", *given, *extra]
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    kept: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    if str(kept["compiled"]) != str(settings.get("trainer.compile", kept["compiled"])):
        raise RuntimeError(f"the compiler failed:\n{done.stderr[-3000:]}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    arguments = parser.parse_intermixed_args()
    device = "cuda" if "trainer.device=cuda" in arguments.settings else "cpu"
    rate = product_rate(device, arguments.workers)
    rows = []
    for size in arguments.sizes:
        kept = [measure(SIZES[size], arguments.workers, arguments.settings) for _ in range(arguments.rounds)]
        step_s = statistics.median(statistics.median(run["steps"]) for run in kept)
        mean_s = statistics.fmean(statistics.fmean(run["steps"]) for run in kept)
        shares = {part: round(statistics.fmean(run["parts"][part] for run in kept) / mean_s, 4) for part in PARTS}
        rows.append({
            "size": size, "workers": arguments.workers, "parameters": kept[0]["parameters"], "steps_per_s": round(1 / step_s, 3),
            "step_s": [round(statistics.median(run["steps"]), 5) for run in kept], "tokens_per_s": round(kept[0]["tokens_per_step"] / step_s),
            "product_rate": round(rate / 1e9), "products": round(kept[0]["flops_per_step"] / rate / step_s, 3), "shares": shares,
            "torch": kept[0]["torch"], "device": kept[0]["device"],
        })  # fmt: skip
        row(**rows[-1])
    print(f"\n{'size':16}{'step':>10}{'tokens/s':>12}{'products':>10}" + "".join(f"{part:>11}" for part in PARTS))
    for entry in rows:
        columns = "".join(f"{entry['shares'][part]:>11.1%}" for part in PARTS)
        print(f"{entry['size']:16}{1e3 / entry['steps_per_s']:>7.0f} ms{entry['tokens_per_s']:>12,}{entry['products']:>10.0%}{columns}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    sys.exit(main())
