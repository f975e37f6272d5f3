"""What snapshots cost, at 10.65 M parameters by default: one on disk every 10 steps, one in memory every 5.

    python benchmarks/snapshot_cost.py             # two workers of one thread, 60 steps
    python benchmarks/snapshot_cost.py --shape 12x768 --every 20 --batch_size 16 --steps 60

Measured in the worker that writes: the seconds for which the loop waits for a snapshot (the agreement that
the last one is written, the audit, the copy), the CPU seconds of the threads that write, and a plain copy of
the same tensors into warm memory just before it. Exit code 1 unless (waits + CPU seconds) / (cores x wall
seconds) is at most 1 % and the median wait at most 1.5 x the plain copy.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import arguments_of, row, wait_for_success

from mingpt.base import events
from mingpt.config.cli import parse
from mingpt.tools.jobs import Job, torchrun

if TYPE_CHECKING:
    from torch import Tensor

    from mingpt.distributed import Launch
    from mingpt.parallel import Strategy
    from mingpt.training.state import TrainState

SETTINGS = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.2,
    "optimizer.name": "adamw", "trainer.batch_size": 64, "trainer.micro_batch_size": 8,
    "trainer.log_every": 10, "trainer.eval_every": 100_000, "trainer.sample_tokens": 0,
    "trainer.device": "cpu", "snapshot.every": 10, "data.val_fraction": 0.01,
}  # fmt: skip
TIMES = "times.json"


class SaveTimes:
    """In a worker: the waits for snapshots on disk and in memory, the writers' CPU time, plain copies."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / TIMES
        self.seconds: dict[str, list[float]] = {"disk": [], "memory": [], "cpu": [], "copy": []}
        self.writer_began: dict[str, float] = {}  # by kind: each has one thread at a time
        self.is_rank_0 = False
        self.run_began = self.save_began = 0.0
        events.subscribe("worker_start", self.on_worker_start)
        events.subscribe("run_start", self.on_run_start)
        events.subscribe("save_start", self.on_save_start)
        events.subscribe("save_end", self.on_save_end)
        events.subscribe("write_start", self.on_write_start)
        events.subscribe("write_end", self.on_write_end)
        events.subscribe("run_end", self.on_run_end)

    def on_worker_start(self, launch: "Launch") -> None:
        self.is_rank_0 = launch.rank == 0

    def on_run_start(self, state: "TrainState", strategy: "Strategy") -> None:
        self.state = state
        self.copies: dict[str, Tensor] = {name: part.clone() for name, part in state.tensors().items()}
        self.run_began = time.perf_counter()

    def on_save_start(self, kind: str, step: int) -> None:
        import torch.distributed

        tensors = self.state.tensors()
        began = time.perf_counter()
        for name, copy in self.copies.items():
            copy.copy_(tensors[name])
        self.seconds["copy"].append(time.perf_counter() - began)
        torch.distributed.barrier()  # what follows is not the wait for a slower worker
        self.save_began = time.perf_counter()

    def on_save_end(self, kind: str, step: int) -> None:
        self.seconds[kind].append(time.perf_counter() - self.save_began)

    def on_write_start(self, kind: str, step: int) -> None:
        self.writer_began[kind] = time.thread_time()

    def on_write_end(self, kind: str, step: int) -> None:
        self.seconds["cpu"].append(time.thread_time() - self.writer_began[kind])

    def on_run_end(self, state: "TrainState") -> None:
        """Rank 0 leaves in run_dir what it has measured."""
        if self.is_rank_0:
            wall_s = time.perf_counter() - self.run_began
            self.path.write_text(json.dumps(self.seconds | {"wall_s": wall_s}))


def work(arguments: list[str]) -> None:
    """train.py, with its snapshots timed."""
    SaveTimes(Path(parse(arguments).run_dir))
    import train

    sys.argv = ["train.py", *arguments]
    train.main()


def measure(more: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 measured in a run."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name, "run")
        given = arguments_of(SETTINGS | more | {"run_dir": run_dir})
        job = Job([*torchrun(2), __file__, "--worker", *given], run_dir)
        wait_for_success(job)
        measured: dict[str, Any] = json.loads((run_dir / TIMES).read_text())
    return measured


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shape", default="6x384", help="layers x width")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=64)
    arguments = parser.parse_args()
    layers, width = map(int, arguments.shape.split("x"))
    shape = {"model.n_layer": layers, "model.n_embd": width, "model.n_head": width // 64}
    more = {"snapshot.every": arguments.every, "trainer.batch_size": arguments.batch_size}
    measured = measure(shape | more | {"trainer.max_steps": arguments.steps})
    wall_s = measured.pop("wall_s")
    rounded = {kind: [round(value, 5) for value in seconds] for kind, seconds in measured.items()}
    row(**rounded, wall_s=round(wall_s, 3))
    cores = os.cpu_count() or 1
    waits_s, cpu_s = sum(measured["disk"]) + sum(measured["memory"]), sum(measured["cpu"])
    share = (waits_s + cpu_s) / (cores * wall_s)
    copy_s = statistics.median(measured["copy"])
    ratios = {kind: round(statistics.median(measured[kind]) / copy_s, 3) for kind in ("disk", "memory")}
    row(
        steps=arguments.steps,
        wall_s=round(wall_s, 1),
        waits_s=round(waits_s, 3),
        writer_cpu_s=round(cpu_s, 3),
        share=round(share, 5),
    )
    row(plain_copy_s=round(copy_s, 5), wait_over_copy=ratios)
    return 0 if share <= 0.01 and max(ratios.values()) <= 1.5 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    sys.exit(main())
