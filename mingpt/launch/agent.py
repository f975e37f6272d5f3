"""`python train.py` without a launcher: torchrun's agent in this process, with one worker per GPU or core.

As `torchrun --standalone --nproc_per_node=N --max-restarts=M train.py ...`, without torchrun's own output,
and with the exit code of a single process: 0 finished or stopped, 2 a user's mistake, 1 anything else.
"""

import dataclasses
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mingpt.config import Config, check_workers
from mingpt.distributed.device import usable_cores
from mingpt.distributed.launch import AGENT_PID, STATUS_FILE, Launch
from mingpt.distributed.signals import SIGNALS, StopSignal

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

MAX_WORKERS = 8
SHUTDOWN_TIMEOUT_S = 24 * 3600  # workers that were told to stop are writing a snapshot
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


def choose_workers(config: Config, launch: Launch) -> int:
    """How many workers `trainer.workers` means on this machine. Raises UserError if they are too many."""
    trainer = config.trainer
    if trainer.workers != "auto":
        check_workers(config, trainer.workers)
        return trainer.workers
    if trainer.device == "mps" or (config.snapshot.path or "").startswith("memory://"):
        return 1  # Apple's GPU, and snapshots in the memory of a process, are for one
    available = usable_cores() // launch.threads(trainer)
    if trainer.device != "cpu":
        import torch

        if torch.cuda.is_available():
            available = torch.cuda.device_count()
        elif torch.backends.mps.is_available():
            return 1
    return max(1, min(available, MAX_WORKERS, trainer.batch_size // trainer.micro_batch_size))


def run_agent(workers: int, max_restarts: int, command: Sequence[str], stop_signal: StopSignal) -> NoReturn:
    """Run `python *command` in so many workers, restarted up to `max_restarts` times; exit as they did."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False

    def stop_agent(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    with tempfile.TemporaryDirectory(prefix="mingpt-") as folder:
        status_file = Path(folder) / "status"
        os.environ[STATUS_FILE] = str(status_file)
        os.environ[AGENT_PID] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        agent = elastic_launch(launch_config(workers, max_restarts, Path(folder)), sys.executable)
        gc.enable()
        stop_signal.close()
        # The workers inherit this thread's mask: these signals wait until their StopSignal unblocks them.
        # Another thread of this process, which does not block them, receives the agent's own.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        handle_signals(stop_agent)  # until the agent installs handlers that do the same
        try:
            try:
                agent(*command)
                code = 0
            except ChildFailedError as error:
                code = 1
                killed = [rank for rank in sorted(error.failures) if error.failures[rank].exitcode < 0]
                if killed:  # that worker could not report it itself
                    name = signal.Signals(-error.failures[killed[0]].exitcode).name
                    sys.stderr.write(
                        f"error: worker {killed[0]} was killed by {name} and no restart is left "
                        "(trainer.max_restarts)\n"
                    )
            handle_signals(signal.SIG_IGN)  # nothing is left to stop
        except SignalException:  # from a user, or from rank 0 to end the job
            handle_signals(signal.SIG_IGN)
            try:
                code = int(status_file.read_text())
            except (OSError, ValueError):  # rank 0 was killed before it could write it
                code = 1
    os._exit(code)


def launch_config(workers: int, max_restarts: int, folder: Path) -> "LaunchConfig":
    """As `torchrun --standalone` has it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    newer: dict[str, Any] = {
        "shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        "signals_to_handle": ",".join(handled_signals()),
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # not every version of torch has them
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        **{name: value for name, value in newer.items() if name in known},
    )


def handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for name in handled_signals():
        signal.signal(signal.Signals[name], handler)


def handled_signals() -> list[str]:
    """Signals that stop the job; SIGHUP is left alone under nohup, which ignores it."""
    is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [name for name in STOP_SIGNALS if name != "SIGHUP" or not is_under_nohup]
