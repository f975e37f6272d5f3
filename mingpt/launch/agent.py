"""`python train.py` without a launcher: torchrun's agent in this process, with several workers.

This works like `torchrun --standalone --nproc_per_node=N --max-restarts=M train.py ...`, but without
torchrun's own output. The exit code is 0 (finished or stopped), 2 (a user's mistake) or 1 (anything else).
"""

import gc
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from mingpt.base.errors import NonRetryableError, UserError
from mingpt.base.system import LOOPBACK, allow_open_files, usable_cores
from mingpt.config import Config, check_workers
from mingpt.distributed.ends import FINISHED, LOST_PEER, STOPPED, TIMED_OUT, GenerationEnd
from mingpt.distributed.exit import BEFORE_FIRST, JOB_ENDED, STORAGE_S, before_first_step, write_stderr
from mingpt.distributed.launch import AGENT_PID, Launch
from mingpt.distributed.rendezvous import read_generation_end
from mingpt.distributed.signals import SIGNALS, SignalListener
from mingpt.distributed.worker import Worker

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.launcher.api import LaunchConfig

MAX_WORKERS = 8  # the most workers that `trainer.workers=auto` means
SHUTDOWN_TIMEOUT_S = 24 * 3600  # workers that were told to stop need time to write a snapshot
BACKEND = "mingpt-one-node"


def choose_workers(config: Config, launch: Launch) -> int:
    """Return the number of workers that the setting trainer.workers asks for.

    auto means one worker per GPU. On CPUs, auto means the number of cores divided by a worker's number of
    threads. In both cases auto means at least one, at most MAX_WORKERS, and at most the number of
    micro-batches in a step. If trainer.device is mps or snapshot.path begins with memory://, auto means one
    worker. Raises UserError if trainer.workers is a number larger than the number of micro-batches in a step.
    """
    trainer = config.trainer
    if trainer.workers != "auto":
        check_workers(config, trainer.workers)
        return trainer.workers
    if trainer.device == "mps" or (config.snapshot.path or "").startswith("memory://"):
        return 1  # several workers cannot share these
    available = usable_cores() // launch.threads(trainer.threads)
    if trainer.device != "cpu":
        import torch

        if torch.cuda.is_available():
            available = torch.cuda.device_count()
    return max(1, min(available, MAX_WORKERS, trainer.batch_size // trainer.micro_batch_size))


def start_workers(worker: Worker, config: Config, command: Sequence[str]) -> None:
    """Under plain `python`, run `python *command` in as many workers as trainer.workers asks for, then exit.

    The exit code is that of the job. If a launcher has started this process, or if the job has only one
    worker, this process is itself a worker, and the function returns. Unless trainer.eval_only is set, a file
    STOP in run_dir is from now on a request to stop. If `command[0]` is no file, the module
    mingpt.launch.train takes its place.

    Without a launcher, raises UserError if trainer.workers is too large, or is auto although srun has started
    several tasks; also raises the errors of `run_agent`.
    """
    launch, run_dir = worker.launch, Path(config.run_dir)

    def note_stop() -> None:
        from mingpt.report import mark_ended

        mark_ended(run_dir, "stopped")

    if not config.trainer.eval_only:
        # In a restart run.json may still say "running", if the previous workers could not record their end.
        note = note_stop if launch.restart_count else None
        worker.stop_signal.watch_stop_file(run_dir / "STOP", note)
    if launch.is_distributed:
        sys.stderr.write(launch.describe_leftovers())
        return
    if launch.slurm_tasks > 1 and config.trainer.workers == "auto":
        raise UserError(
            f"srun has started {launch.slurm_tasks} tasks without torchrun: start one torchrun "
            "per node, as launch/slurm/several_nodes.sbatch does, or set trainer.workers"
        )
    workers = choose_workers(config, launch)
    if workers > 1:
        # Not `-` or `-c`: a program that came through standard input is not there for the workers.
        program = [command[0]] if os.path.isfile(command[0]) else ["-m", "mingpt.launch.train"]
        run_agent(workers, config.trainer.max_restarts, [*program, *command[1:]], worker.stop_signal)


class StopRequest:
    """The signal that told this job to stop. torch's agent obeys when it next calls the rendezvous.

    Before that call, the signal handler `note` raises nothing. torch's rendezvous might swallow a
    SignalException, and a SignalException during the start of workers would leave these workers running.
    JOB_ENDED is the signal of a worker that ends the job; other signals come from a user or a scheduler.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_obeyed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal. This is a signal handler.

        If `obey` has already raised SignalException, and `number` is not JOB_ENDED, raise it again, so that
        the workers exit at once. This process then ends within STORAGE_S seconds, even if a worker's disk
        hangs and the worker cannot exit.
        """
        self.first = self.first or signal.Signals(number)
        if self.is_obeyed and number != JOB_ENDED:
            threading.Timer(STORAGE_S, os._exit, [1]).start()
            self.obey()

    def obey(self) -> None:
        """If the job was told to stop, raise SignalException, which ends the agent and its workers."""
        from torch.distributed.elastic.multiprocessing import SignalException

        if self.first:
            self.is_obeyed = True
            passed_on = signal.SIGTERM if self.first == JOB_ENDED else self.first
            raise SignalException(f"got {self.first.name}", sigval=passed_on)


def job_exit(
    told: signal.Signals | None, codes: Mapping[int, int], end: GenerationEnd | None, command: str
) -> tuple[int, str]:
    """Return the exit code of a job whose workers have ended, and the text to print.

    `told` is the signal that told the job to stop; None if there was none. `codes` has the exit codes of the
    workers that failed, by rank: -9 if SIGKILL killed the worker. `end` is how the last workers ended; None
    if they did not meet at the rendezvous. `command` is what the workers ran.
    """
    reason = (end.exit_reasons[0] if end else None) or {"why": "", "code": None}
    if told == JOB_ENDED:  # the worker has printed why
        return reason["code"] or 1, ""
    if told and reason["code"] == 0:
        return 0, before_first_step(told.name) if reason["why"].endswith(BEFORE_FIRST) else ""
    if told and not codes:
        if end is None:
            return 0, before_first_step(told.name)
        return 1, "error: the job was told to stop, but worker 0 could not end in order\n"
    if not codes and reason["why"].startswith((FINISHED, STOPPED)):
        return 0, ""
    if not codes:
        return 1, f"error: the workers ended without training: {command}\n"
    killed = [(rank, signal.Signals(-code)) for rank, code in sorted(codes.items()) if code < 0]
    if killed:
        rank, number = killed[0]
        what = f"worker {rank} was killed by {number.name}"
    elif end and all(one and one["why"].startswith((LOST_PEER, TIMED_OUT)) for one in end.exit_reasons):
        what = end.sentence()
    else:
        return 1, ""  # a worker that failed has printed why
    return 1, f"error: {what} and no restart is left (trainer.max_restarts)\n"


def run_agent(
    workers: int, max_restarts: int, command: Sequence[str], stop_signal: SignalListener
) -> NoReturn:
    """Run `python *command` in `workers` processes; then exit with the job's exit code.

    If a worker fails, and the failure does not end the job, all workers are restarted, at most `max_restarts`
    times. A StopRequest takes over the handling of signals from `stop_signal`. Raises UserError if the system
    allows too few open files, and NonRetryableError if the system allows too few processes. Other errors of
    torch's agent, except ChildFailedError, are also raised, unless the job was told to stop.
    """
    allow_open_files(workers)
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False

    # `stop_signal` still listens, because this C++ code asks a name resolver, which may not answer.
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    stop = StopRequest()
    signal.signal(JOB_ENDED, stop.note)
    stop_signal.hand_over(stop.note)
    earlier = register_rendezvous(store, stop)
    os.environ[AGENT_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    # Resolving this host's name may fail or take 20 s. On systems other than Linux, gloo resolves it.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    socket.getfqdn = lambda name="": name or platform.node()  # for torch's events, which nobody reads
    agent = elastic_launch(launch_config(workers, max_restarts), sys.executable)
    gc.enable()
    # The workers inherit this thread's mask, so these signals wait until a worker's SignalListener unblocks
    # them. The agent's own signals arrive in another thread, which does not block them.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    codes: Mapping[int, int] = {}
    try:
        agent(*command)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except BlockingIOError:  # EAGAIN of fork
        raise NonRetryableError(
            f"{workers} workers cannot be started: the system allows no more processes (ulimit -u); "
            "raise that limit, or set trainer.workers=1"
        ) from None
    except Exception as error:
        stop.first = stop.first or getattr(error, "sigval", None)  # from a handler that torch has set
        if stop.first is None:
            raise
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    found = read_generation_end(store)
    end = found[0] if found and found[0].name not in earlier else None
    code, text = job_exit(stop.first, codes, end, shlex.join(command))
    write_stderr(text)
    os._exit(code)


def register_rendezvous(store: "TCPStore", stop: StopRequest) -> set[str]:
    """Register with torch, under the name BACKEND, a rendezvous for a single agent.

    The workers use the TCPStore `store`. The rendezvous needs no host name, and obeys `stop`. Returns a set
    of names. Before each start of workers, the rendezvous adds the name of the newest generation (the workers
    of one start) in `store` to this set, unless a worker has told the agent that the job ends (JOB_ENDED).
    """
    earlier = set[str]()
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class Rendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            """Obey `stop`, if it has a signal; else return the rendezvous. Called before workers start."""
            found = read_generation_end(store)
            if found and stop.first != JOB_ENDED:
                earlier.add(found[0].name)
            stop.obey()
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(store.host, store.port))

        def num_nodes_waiting(self) -> int:
            """Obey `stop`, if it has a signal; else return 0. Called every 0.1 s while the workers run."""
            stop.obey()
            return 0

    rendezvous_handler_registry.register(
        BACKEND, lambda params: Rendezvous(store.host, store.port, 0, 1, params.run_id, 0)
    )
    return earlier


def launch_config(workers: int, max_restarts: int) -> "LaunchConfig":
    """Return torchrun's LaunchConfig for one node, with the rendezvous BACKEND, and without files of logs."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=str(uuid.uuid4()),
        rdzv_backend=BACKEND,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    config.shutdown_timeout = SHUTDOWN_TIMEOUT_S  # torch 2.11 has no such field, and ignores it
    config.signals_to_handle = ""  # `StopRequest.note` stays the handler
    return config
