"""A worker's life from its first line to its exit code.

This module imports little, so that a signal is heard a few hundredths of a second after the process starts.
"""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mingpt.base import events
from mingpt.base.command import open_streams
from mingpt.base.errors import StopRequested, UserError
from mingpt.base.system import check_working_directory, use_one_arena
from mingpt.distributed.exit import ProcessExit
from mingpt.distributed.launch import Launch
from mingpt.distributed.signals import StopSignal

if TYPE_CHECKING:
    from mingpt.config import Config
    from mingpt.distributed.context import DistributedContext


class Worker:
    """This process. As a context manager it exits with the code that shows how its block ended:

    0 if it finished or was told to stop, 128 + signal if told to stop by a signal other than SIGUSR1 under an
    agent (such as torchrun's), 2 after a UserError, 1 after any other error. The block sets `stopped_by` to
    the request that stopped it. Constructing a Worker begins to listen for signals, and exits with 2 if the
    launcher's variables are incomplete.
    """

    def __init__(self) -> None:
        open_streams()
        use_one_arena()
        gc.disable()  # importing torch takes an eighth less time without the garbage collector
        try:
            check_working_directory()
            self.launch = Launch.from_environment()
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2)
        self.exit = ProcessExit(self.launch)
        self.stop_signal = StopSignal(self.launch, self.exit)
        self.stopped_by: str | None = None
        events.emit("worker_start", launch=self.launch)

    def __enter__(self) -> "Worker":
        return self

    def start_workers(self, config: "Config", command: Sequence[str]) -> None:
        """Under plain `python`, run `python *command` in as many workers as `trainer.workers` asks for.

        Exits with the job's exit code. Returns if this process is itself a worker: under a launcher, or if
        one is enough. Calls `watch_stop_file` first in any case. Raises UserError if `trainer.workers` is too
        large, or is auto in one of several srun tasks without torchrun.
        """
        self.watch_stop_file(config)
        if self.launch.is_distributed:
            sys.stderr.write(self.launch.describe_leftovers())
            return
        if self.launch.slurm_tasks > 1 and config.trainer.workers == "auto":
            raise UserError(
                f"srun has started {self.launch.slurm_tasks} tasks without torchrun: start one torchrun "
                "per node, as launch/slurm/several_nodes.sbatch does, or set trainer.workers"
            )
        from mingpt.config import PROJECT
        from mingpt.launch.agent import choose_workers, run_agent

        workers = choose_workers(config, self.launch)
        if workers > 1:
            # Not `-` or `-c`: a program that came through standard input is not there for the workers.
            program = command[0] if os.path.isfile(command[0]) else str(PROJECT / "train.py")
            run_agent(workers, config.trainer.max_restarts, [program, *command[1:]], self.stop_signal)

    def watch_stop_file(self, config: "Config") -> None:
        """Take a file STOP in run_dir for a request to stop. A run with `eval_only` ignores the file."""
        run_dir = Path(config.run_dir)

        def note_stop() -> None:
            from mingpt.report import mark_ended

            mark_ended(run_dir, "stopped")

        if not config.trainer.eval_only:
            # In a restart the generation before was training and could not record how it ended.
            is_restart = self.launch.restart_count > 0
            self.stop_signal.watch_stop_file(run_dir / "STOP", note_stop if is_restart else None)

    def connect(self, config: "Config") -> "DistributedContext":
        """Meet this generation's workers; return the DistributedContext, or raise its errors. Collective."""
        from mingpt.distributed.context import DistributedContext

        gc.enable()
        gc.freeze()  # imported objects stay alive, so collections need not look at them again
        return DistributedContext(self.launch, config.trainer, self.stop_signal, self.exit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, StopRequested):
            self.stop_signal.exit_before_training(error.reason)
        if self.stopped_by:
            error = StopRequested(self.stopped_by)
        if error is None or isinstance(error, Exception):
            self.exit.exit_process(error, lambda: self.stop_signal.has_sigterm)
