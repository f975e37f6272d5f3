"""`python train.py` without a launcher: torchrun's agent in this process, with one worker per GPU or core.

It works like `torchrun --standalone --nproc_per_node=N --max-restarts=M train.py ...`, without torchrun's own
output, and with the exit code of a single process: 0 finished or stopped, 2 a user's mistake, 1 anything
else.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mingpt.base.errors import NonRetryableError
from mingpt.base.files import temporary_folder
from mingpt.base.system import ipv4_addresses, loopback_address
from mingpt.config import Config, check_workers
from mingpt.distributed.device import allow_open_files, usable_cores
from mingpt.distributed.exit import before_first_step, write_stderr
from mingpt.distributed.launch import AGENT_FOLDER, AGENT_PID, STATUS_FILE, Launch
from mingpt.distributed.rendezvous import find_local_peers, kill_by_pidfd, wait_readable
from mingpt.distributed.signals import POLL_S, REPEAT_S, SIGNALS, StopSignal

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

MAX_WORKERS = 8  # with `trainer.workers=auto`
SHUTDOWN_TIMEOUT_S = 24 * 3600  # workers that were told to stop need time to write a snapshot
BACKEND = "mingpt-one-node"
DEAF_S = 4.0  # the main thread hears a signal within so many seconds, or waits in C++ code


def choose_workers(config: Config, launch: Launch) -> int:
    """Return the number of workers for `trainer.workers`. UserError if a step has fewer micro-batches.

    auto is one per GPU, else one per `Launch.threads` cores, but at most MAX_WORKERS and the number of
    micro-batches in a step. It is one with trainer.device=mps, and with snapshots in a process's memory.
    """
    trainer = config.trainer
    if trainer.workers != "auto":
        check_workers(config, trainer.workers)
        return trainer.workers
    if trainer.device == "mps" or (config.snapshot.path or "").startswith("memory://"):
        return 1  # several workers cannot share these
    available = usable_cores() // launch.threads(trainer)
    if trainer.device != "cpu":
        import torch

        if torch.cuda.is_available():
            available = torch.cuda.device_count()
    return max(1, min(available, MAX_WORKERS, trainer.batch_size // trainer.micro_batch_size))


class StopRequest:
    """The first signal that told this job to stop. torch's agent obeys it when it next calls the rendezvous.

    Until then the signal handler raises nothing. torch's rendezvous may swallow SignalException, which is an
    Exception; if one is raised while workers are being started, they keep running.
    """

    def __init__(self, status_file: Path) -> None:
        self.status_file = status_file
        self.first: signal.Signals | None = None
        self.is_obeyed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first. If `obey` has raised, raise again, and workers exit at once."""
        self.first = self.first or signal.Signals(number)
        if self.is_obeyed:
            self.obey()

    def listen(self) -> None:
        """Start a thread that receives signals, also while the main thread runs C++ code. For that thread."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # Python writes the signals' numbers there
        threading.Thread(target=self.watch, args=(read_end,), daemon=True).start()

    def watch(self, read_end: int) -> None:
        """End this process if `note` is not called within DEAF_S of a signal, or before a second signal.

        The main thread is then in C++ code, where Python runs no handlers, and has started no workers.
        """
        received_at, is_second = float("inf"), False
        while self.first is None and not is_second and time.monotonic() - received_at < DEAF_S:
            readable = wait_readable({0: read_end}, POLL_S)
            if readable and os.read(read_end, 1)[0] in SIGNALS:
                is_second = time.monotonic() - received_at > REPEAT_S
                received_at = min(received_at, time.monotonic())
        if self.first is None:
            write_stderr(before_first_step("a signal"))
            os._exit(0)
        threading.Event().wait()  # this thread goes on receiving signals, which the main thread blocks

    def obey(self, before_start: bool = False) -> None:
        """If the job was told to stop, raise SignalException, which ends the agent and its workers.

        `before_start`: no worker runs that could write the status file, so write it here.
        """
        from torch.distributed.elastic.multiprocessing import SignalException

        if self.first:
            if before_start and not self.status_file.exists():
                self.status_file.write_text(f"0 {before_first_step(self.first.name)}")
            self.is_obeyed = True
            raise SignalException(f"got {self.first.name}", sigval=self.first)

    def exit_code(self) -> int:
        """Return the stopped job's exit code by the status file, 1 without it; print the file's sentence."""
        try:
            code, sentence = self.status_file.read_text().split(" ", 1)
        except (OSError, ValueError):  # rank 0 was killed before it wrote the file, or the disk is full
            code, sentence = "1", "error: the job was told to stop, but worker 0 could not end in order\n"
        write_stderr(sentence)
        return int(code)


def run_agent(workers: int, max_restarts: int, command: Sequence[str], stop_signal: StopSignal) -> NoReturn:
    """Run `python *command` in `workers` processes, restart up to `max_restarts` times, exit as they did."""
    allow_open_files(workers)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False

    with temporary_folder(AGENT_FOLDER) as folder:
        stop = StopRequest(Path(folder) / "status")
        stop_signal.close(stop.note)
        stop.listen()
        signal.signal(signal.SIGUSR2, pass_on)
        register_rendezvous(stop)
        os.environ[STATUS_FILE] = str(stop.status_file)
        os.environ[AGENT_PID] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        avoid_names()
        agent = elastic_launch(launch_config(workers, max_restarts, Path(folder)), sys.executable)
        gc.enable()
        # The workers inherit this thread's mask, so these signals wait until a worker's StopSignal unblocks
        # them. The agent's own signals arrive in the thread of `stop`, which does not block them.
        signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, signal.SIGUSR2])
        failures: Mapping[int, Any] = {}  # torch's ProcessFailure, by rank
        try:
            agent(*command)
        except ChildFailedError as error:
            failures = error.failures
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
        # A worker that ends the job writes the status file and sends a signal. Its exit may be seen first.
        if stop.first and (stop.status_file.exists() or not failures):
            code = stop.exit_code()
        else:
            # Worker 0 creates the file as soon as the run has ended in order.
            has_trained = stop.status_file.exists()
            code = 0 if has_trained and not failures else 1
            if not (has_trained or failures):
                write_stderr(f"error: the workers ended without training: {shlex.join(command)}\n")
            killed = [rank for rank in sorted(failures) if failures[rank].exitcode < 0]
            if killed:  # the killed worker could not report it itself
                name = signal.Signals(-failures[killed[0]].exitcode).name
                write_stderr(
                    f"error: worker {killed[0]} was killed by {name} and no restart is left "
                    "(trainer.max_restarts)\n"
                )
    os._exit(code)


def pass_on(number: int, frame: FrameType | None) -> None:
    """Pass SIGUSR2 on to the workers, which then write their stacks. This is the handler of SIGUSR2."""
    for pidfd in find_local_peers(os.getpid()).values():
        kill_by_pidfd(pidfd, number)
        os.close(pidfd)


def avoid_names() -> None:
    """Have gloo and torch's agent do without this host's name: a resolver may fail, or take 20 s."""
    with contextlib.suppress(OSError):  # no Linux: then gloo looks the name up
        interfaces = [name for name, address in ipv4_addresses() if address.ip.is_loopback]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[0] if interfaces else "lo")
    socket.getfqdn = lambda name="": name or platform.node()  # for torch's events, which nobody reads


def register_rendezvous(stop: StopRequest) -> None:
    """Register, as BACKEND, a rendezvous of this agent alone, which needs no host name and obeys `stop`."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class Rendezvous(RendezvousHandler):
        use_agent_store = True  # the workers meet in this store

        def __init__(self, params: RendezvousParameters) -> None:
            self.run_id, host = params.run_id, loopback_address()
            self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.place = RendezvousStoreInfo(host, self.store.port)

        def get_backend(self) -> str:
            return BACKEND

        def get_run_id(self) -> str:
            return self.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            """Return the rendezvous, or obey `stop`. The agent calls this before it starts workers."""
            stop.obey(before_start=True)
            return RendezvousInfo(self.store, 0, 1, self.place)

        def num_nodes_waiting(self) -> int:
            """Return 0, or obey `stop`. The agent calls this every 0.1 s."""
            stop.obey()
            return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass  # no other agent could join

        def shutdown(self) -> bool:
            return True

    rendezvous_handler_registry.register(BACKEND, Rendezvous)


def launch_config(workers: int, max_restarts: int, folder: Path) -> "LaunchConfig":
    """Return the LaunchConfig of `torchrun --standalone`, with rendezvous BACKEND and logs in `folder`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    newer: dict[str, Any] = {
        "shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        "signals_to_handle": "",  # `StopRequest.note` stays the handler
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older versions of torch lack some
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=str(uuid.uuid4()),
        rdzv_backend=BACKEND,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        **{name: value for name, value in newer.items() if name in known},
    )
