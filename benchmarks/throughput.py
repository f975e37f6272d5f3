"""Where a step's time goes: steps and tokens per second, and the shares of the parts of a step.

    python benchmarks/throughput.py     # default, nanoGPT's CPU size, 10 M with and without dropout: 5 min
    python benchmarks/throughput.py --sizes default --rounds 1             # half a minute

Prints a row per size, as JSON. `products`: the arithmetic's time at the rate of a large matrix product,
divided by the step's time. A part's share is its time in the main thread, divided by the step's time; each
part ends with an event (ENDS). `reduction` is what is left of the reduction after the last backward pass;
`optimizer` includes clipping. CPU seconds and page faults of a step, and peak memory, are rank 0's. On a
GPU (`--workers 1 trainer.device=cuda`) the shares of forward and backward are the times of their launches.
Needs cores that nobody else uses.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from steps_against import BIG, SIZES
from support.jobs import Job

from mingpt.base import events
from mingpt.config import Config
from mingpt.tools.jobs import torchrun

if TYPE_CHECKING:
    from mingpt.distributed import Launch
    from mingpt.training.state import TrainState

SIZES = SIZES | {"10M-no-dropout": BIG | {"model.dropout": 0.0}}
QUIET = {
    "trainer.eval_every": 10**6, "trainer.sample_tokens": 0, "trainer.log_every": 10**6,
    "trainer.replay_every": 0, "data.val_fraction": 0.01,
}  # fmt: skip
PARTS = ("data", "forward", "backward", "reduction", "optimizer", "snapshot")
# {event of the main thread: part of a step that ends with it}
ENDS = {
    "batch": "data",
    "forward_end": "forward",
    "backward_end": "backward",
    "partial_sums": "backward",
    "reduction_end": "reduction",
    "optimizer_end": "optimizer",
    "save_end": "snapshot",
}
# Rank 0's CPU seconds and page faults per step, and its peak memory.
USAGE = ("user_s", "system_s", "page_faults", "peak_mb")
TIMES = "times.json"
CODE = "import throughput; from mingpt.config.cli import parse; throughput.StepTimes(parse(sys.argv[1:]))"


class StepTimes:
    """Measures a worker's seconds per step and, after the first quarter of the steps, seconds per part."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.warm_up = max(1, config.trainer.max_steps // 4)
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.steps: list[float] = []
        self.usage = resource.getrusage(resource.RUSAGE_SELF)  # before the first step that counts
        self.is_rank_0 = False
        self.step_began = self.part_began = 0.0
        events.subscribe("worker_start", self.on_worker_start)
        events.subscribe("step_start", self.on_step_start)
        events.subscribe("save_start", self.on_save_start)
        for event, part in ENDS.items():
            events.subscribe(event, functools.partial(self.end_part, part))
        events.subscribe("step_end", self.on_step_end)
        events.subscribe("run_end", self.on_run_end)

    def on_worker_start(self, launch: "Launch") -> None:
        self.is_rank_0 = launch.rank == 0

    def on_step_start(self, step: int) -> None:
        if step == self.warm_up:
            self.parts = dict.fromkeys(PARTS, 0.0)
            self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.step_began = self.part_began = time.perf_counter()

    def on_save_start(self, kind: str, step: int) -> None:
        self.part_began = time.perf_counter()

    def end_part(self, part: str, /, **_: Any) -> None:
        now = time.perf_counter()
        self.parts[part] += now - self.part_began
        self.part_began = now

    def on_step_end(self, step: int) -> None:
        self.steps.append(time.perf_counter() - self.step_began)

    def on_run_end(self, state: "TrainState") -> None:
        """Write rank 0's measurements to times.json in run_dir."""
        if not self.is_rank_0:
            return
        steps = self.steps[self.warm_up :]
        tokens = self.config.trainer.batch_size * self.config.data.block_size
        first, last = self.usage, resource.getrusage(resource.RUSAGE_SELF)
        measured = {
            "steps": steps, "user_s": (last.ru_utime - first.ru_utime) / len(steps),
            "system_s": (last.ru_stime - first.ru_stime) / len(steps),
            "page_faults": (last.ru_minflt - first.ru_minflt) / len(steps),
            "peak_mb": common.process_mb(os.getpid(), "VmHWM"),
            "parts": {part: seconds / len(steps) for part, seconds in self.parts.items()},
            "parameters": sum(weight.numel() for weight in state.model.parameters()),
            "tokens_per_step": tokens, "flops_per_step": state.model.flops_per_token() * tokens,
        }  # fmt: skip
        Path(self.config.run_dir, TIMES).write_text(json.dumps(measured))


def measure(settings: common.Settings, workers: int, more: Sequence[str]) -> dict[str, Any]:
    """Train once; return rank 0's measurements (see `on_run_end`), torch's version, device and dtype."""
    with common.work_folder() as folder:
        run_dir = folder / "run"
        given = common.arguments_of({**QUIET, **settings, "run_dir": run_dir}, more)
        command = [*torchrun(workers), common.changed_program(folder, CODE), *given]
        job = Job(command, run_dir, OMP_NUM_THREADS="1")
        common.wait_for_success(job)
        measured: dict[str, Any] = json.loads((run_dir / TIMES).read_text())
        manifest = json.loads(max(run_dir.glob("snapshots/step_*.json")).read_text())
    environment = manifest["software"]
    return measured | {name: environment[name] for name in ("torch", "device", "dtype")}


def measure_size(size: str, device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one size; return its row."""
    runs = [measure(SIZES[size], arguments.workers, arguments.settings) for _ in range(arguments.rounds)]
    rate = product_rate(device, arguments.workers, runs[0]["dtype"])
    medians = [statistics.median(run["steps"]) for run in runs]
    step_s = statistics.median(medians)
    mean_s = statistics.fmean(statistics.fmean(run["steps"]) for run in runs)
    parts = {part: statistics.fmean(run["parts"][part] for run in runs) for part in PARTS}
    return {
        "size": size, "workers": arguments.workers, "parameters": runs[0]["parameters"],
        "steps_per_s": round(1 / step_s, 3), "step_s": [round(median, 5) for median in medians],
        **{key: round(statistics.median(run[key] for run in runs), 4) for key in USAGE},
        "tokens_per_s": round(runs[0]["tokens_per_step"] / step_s), "product_rate": round(rate / 1e9),
        "products": round(runs[0]["flops_per_step"] / rate / step_s, 3),
        "shares": {part: round(seconds / mean_s, 4) for part, seconds in parts.items()},
        "torch": runs[0]["torch"], "device": runs[0]["device"], "dtype": runs[0]["dtype"],
    }  # fmt: skip


def product_rate(device: str, threads: int, dtype: str) -> float:
    """Return FLOP/s of a large matrix product in this dtype, on this machine: the best of five."""
    import torch

    torch.set_num_threads(threads)
    size = 8192 if device.startswith("cuda") else 2048
    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the result
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["10M", "10M-no-dropout", "default", "cpu"]
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    arguments = parser.parse_intermixed_args()
    device = "cuda" if "trainer.device=cuda" in arguments.settings else "cpu"
    for size in arguments.sizes:
        common.row(**measure_size(size, device, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
