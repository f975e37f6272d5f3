"""What snapshots cost at 10.65 M parameters: a durable one every 10 steps, and one in memory every 5.

    python benchmarks/snapshot_cost.py             # two workers of one thread, 60 steps

Counted in the worker that writes: the seconds for which the loop waits for a snapshot (all of it: the agreement that the last one is written, the
audit, the copy), the CPU seconds of the threads that write, and a plain copy of the same tensors into warm memory just before it.
Exit code 1 unless (waits + CPU seconds) / (cores x wall seconds) is at most 1 % and the median wait at most 1.5 x the plain copy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, row

SETTINGS = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.2, "optimizer.name": "adamw",
    "trainer.batch_size": 64, "trainer.micro_batch_size": 8, "trainer.log_every": 10, "trainer.eval_every": 100_000, "trainer.sample_tokens": 0,
    "trainer.device": "cpu", "snapshot.every": 10, "data.val_fraction": 0.01,
}  # fmt: skip


def worker(argv: list[str]) -> None:
    """train.py, with a trainer that keeps the time of what it writes."""
    sys.path.insert(0, str(ROOT))
    from mingpt.config import Config, build
    from mingpt.job import work
    from mingpt.snapshot import Writer
    from mingpt.trainer import Trainer

    kept: dict[str, list[float]] = {"durable": [], "memory": [], "cpu": [], "copy": []}

    def timed(target: Any) -> Any:
        def run(*arguments: Any) -> None:
            began = time.thread_time()
            target(*arguments)
            kept["cpu"].append(time.thread_time() - began)

        return run

    class Timed(Trainer):
        def save(self) -> None:
            self.clocked("durable", super().save)

        def save_in_memory(self) -> None:
            self.clocked("memory", super().save_in_memory)

        def clocked(self, kind: str, save: Any) -> None:
            state = self.state()
            began = time.perf_counter()
            for name, tensor in self.plain.items():
                tensor.copy_(state[name])
            kept["copy"].append(time.perf_counter() - began)
            self.cluster.gather(None)  # what follows is not the wait for a slower worker
            began = time.perf_counter()
            save()
            kept[kind].append(time.perf_counter() - began)

        def run(self) -> str | None:
            self.plain = {name: tensor.clone() for name, tensor in self.state().items()}
            began = time.perf_counter()
            stopped = super().run()
            if self.report:
                print(json.dumps(kept | {"wall_s": time.perf_counter() - began}), flush=True)
            return stopped

    Writer.write = timed(Writer.write)  # type: ignore[method-assign]
    from mingpt.memory import Memory

    Memory.finish = timed(Memory.finish)  # type: ignore[method-assign]

    def make(config: Config, cluster: Any) -> Any:
        return Timed(config, cluster)

    work(lambda: build(dict(word.split("=", 1) for word in argv)), make)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given = [f"{key}={value}" for key, value in (SETTINGS | {"trainer.max_steps": arguments.steps, "run_dir": Path(name, "run")}).items()]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "--worker", *given]
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    kept = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    row(**{kind: [round(value, 5) for value in values] if isinstance(values, list) else values for kind, values in kept.items()})
    cores, waits = os.cpu_count() or 1, sum(kept["durable"]) + sum(kept["memory"])
    share = (waits + sum(kept["cpu"])) / (cores * kept["wall_s"])
    copy = statistics.median(kept["copy"])
    ratios = {kind: round(statistics.median(kept[kind]) / copy, 3) for kind in ("durable", "memory")}
    row(
        steps=arguments.steps,
        wall_s=round(kept["wall_s"], 1),
        waits_s=round(waits, 3),
        writer_cpu_s=round(sum(kept["cpu"]), 3),
        share=round(share, 5),
    )
    row(plain_copy_s=round(copy, 5), wait_over_copy=ratios)
    return 0 if share <= 0.01 and max(ratios.values()) <= 1.5 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    sys.exit(main())
