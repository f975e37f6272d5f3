"""Train as a worker of train.py does, and kill this process at the moments that `mingpt verify` has planned.

    python -m mingpt.tools.fault_injection FOLDER section.key=value ...

FOLDER/kills.json is a list with the fields of each Kill. Each kill is done at most once, in the order of the
list. Just before a kill, a file is created at the path that `marker` returns. For each micro-batch that a
worker is about to use, FOLDER/batches.jsonl gets a line [step, micro-batch, digest].
"""

import functools
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mingpt.base import events
from mingpt.distributed.launch import Launch
from mingpt.launch.train import main

if TYPE_CHECKING:  # a worker listens for signals before it imports torch
    from torch import Tensor

STEPS = 48
BATCHES = "batches.jsonl"
PHASE_OF = {"batch": "forward", "reduction_start": "reduction", "evaluation_start": "evaluation"}


class Kill(NamedTuple):
    """A planned SIGKILL of worker `rank`, in `phase` of the first step from `step` on that has this phase.

    But a kill never comes before the plan's earlier kills. `phase` is one of verify.PHASES. `rank` is taken
    modulo the number of workers; in the phase save, rank 0 is killed instead, because rank 0 writes. In the
    phase start-up, `step` is ignored. After the kill the job goes on with `next_workers` workers and
    `next_strategy`, a key of verify.STRATEGIES.
    """

    phase: str
    step: int
    rank: int
    next_workers: int
    next_strategy: str = "ddp"


def marker(folder: Path, number: int) -> Path:
    """Return the path of the file, with a pid in it, that kill `number` of the plan creates in `folder`."""
    return folder / f"killed-{number}"


def digest(inputs: "Tensor", targets: "Tensor") -> str:
    """Return the SHA-256, in hex, of a micro-batch's inputs and targets, (B, T) int64 each on the CPU."""
    content = inputs.contiguous().numpy().tobytes() + targets.contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


class FaultInjector:
    """Kills this worker as `folder`/kills.json plans, and records digests of the worker's micro-batches.

    Construct the FaultInjector before the Worker, because a kill may be planned for the Worker's start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = [Kill(*kill) for kill in json.loads((folder / "kills.json").read_text())]
        self.rank, self.workers, self.step = 0, 1, STEPS
        for name in ("worker_start", "run_start", "batch", "step_end", "file_progress"):
            events.subscribe(name, getattr(self, f"on_{name}"))
        for name, phase in PHASE_OF.items():
            events.subscribe(name, functools.partial(self.kill_if_due, phase))

    def kill_if_due(self, phase: str, **_: Any) -> None:
        """Kill this process if the plan's next kill is for `phase`, this rank, and this or an earlier step.

        Just before the kill, create the file that marks the kill as done.
        """
        for number, kill in enumerate(self.kills):
            if marker(self.folder, number).exists():
                continue
            rank = 0 if phase == "save" else kill.rank % self.workers
            if kill.phase == phase and self.step >= kill.step and self.rank == rank:
                marker(self.folder, number).write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return

    def on_worker_start(self, launch: Launch) -> None:
        self.rank, self.workers = launch.rank, launch.world_size
        self.kill_if_due("start-up")  # a kill in a start-up is due at the next start, whatever its step

    def on_run_start(self, state: Any, **_: Any) -> None:
        self.step = state.step

    def on_batch(self, step: int, micro_batch: int, inputs: "Tensor", targets: "Tensor") -> None:
        line = json.dumps([step, micro_batch, digest(inputs, targets)]) + "\n"
        with open(self.folder / BATCHES, "ab", buffering=0) as file:
            file.write(line.encode())  # in one call, so that the lines of several workers do not mix

    def on_step_end(self, step: int) -> None:
        self.step = step

    def on_file_progress(self, name: str, written: int, size: int) -> None:
        """Do a kill that is due in a save, once half of the `size` bytes of a tensor file are written."""
        if name.endswith(".safetensors") and 2 * written >= size:
            self.kill_if_due("save")


if __name__ == "__main__":
    FaultInjector(Path(sys.argv[1]))
    # The empty configuration file stands for the default one, which the user may have changed.
    sys.argv[1] = os.devnull
    main()
