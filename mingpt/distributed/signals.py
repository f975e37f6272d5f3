"""Requests to stop: SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, a file STOP in run_dir, trainer.pause_after.

A thread receives the signals: Python runs signal handlers in the main thread only, and not while that thread
waits inside a collective. torch is not imported here, so that a worker listens before any slow work.
"""

import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mingpt.base.errors import StopRequested
from mingpt.base.processes import open_siblings, wait_readable
from mingpt.base.system import start, try_within
from mingpt.distributed.ends import DISORDER
from mingpt.distributed.exit import (
    JOB_ENDS,
    PAUSE,
    STORAGE_S,
    PeerLost,
    ProcessExit,
    SignalReceived,
    before_first_step,
    write_stderr,
)
from mingpt.distributed.launch import Launch

log = logging.getLogger(__name__)

# The requests to stop. If ranks have received different ones, the first in this order counts.
REASONS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", *JOB_ENDS)
SIGNALS = [
    signal.Signals[name]
    for name in REASONS
    if name.startswith("SIG")
    if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # nohup ignores it
]
POLL_S = 0.2
# Signals within this time are one request: workers may get a signal twice, directly and from the agent.
REPEAT_S = 1.0
# The main thread has this time to notice a lost peer by itself, because the backend's error has a reason.
PEER_GRACE_S = 0.3
# The time after which a peer that exited counts as lost if the TCPStore does not answer. It is long because
# the store does not answer, either, if the store's host, like all workers, has finished.
UNKNOWN_GRACE_S = 5.0
READ_END = -1  # the pipe's key among the ranks whose pidfds are polled


class SignalListener:
    """Listens for requests to stop, in a thread of its own, and keeps the request in `reason`.

    Before training begins (before `defer` is called), a first signal other than SIGUSR1 ends this process at
    once. SIGUSR1 or a file STOP does so only if this process is the only worker; several workers first agree
    to stop. During training, a request is kept until all ranks have agreed on it. A second signal, more than
    REPEAT_S seconds after the first signal, ends this process at once.

    The thread works even while the main thread waits in a collective or for a disk. The thread also ends this
    process if the agent is gone, or if another worker of the agent failed or was lost (see
    `look_at_siblings`). The same happens if a collective on GPUs has lost a peer, or has waited for longer
    than the time limit of collectives. During training with several workers, the thread also ends this
    process if `ProcessExit.note_progress` is not called for so long after a signal other than SIGUSR1.
    """

    def __init__(self, launch: Launch, process_exit: ProcessExit) -> None:
        self.launch, self.exit = launch, process_exit
        self.received: str | None = None
        self.pause_at = math.inf  # when trainer.pause_after stops the run, by the monotonic clock; inf: never
        self.deferred = False
        self.has_sigterm = False  # whether SIGTERM has come, also right after another signal
        self.stop_file: Path | None = None
        self.stop_found = Future[None]()  # done once there is a file at `stop_file`
        self.note_stop: Callable[[], None] | None = None  # records a stop before the first step in run.json
        self.received_at = float("-inf")
        self.siblings: dict[int, int] = {}  # rank -> pidfd of each other worker of this agent that runs
        self.exited_at: dict[int, float] = {}  # rank -> when each worker that has exited was seen to exit
        self.closed = threading.Event()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte that Python writes to the pipe counts
        signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        faulthandler.register(signal.SIGUSR2, 2)  # stacks go to stderr until there is a run folder
        # mingpt.launch.agent starts its workers with these signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        # A main thread that waits for a disk would take a signal from the kernel and not handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    @property
    def reason(self) -> str | None:
        """The request to stop that this process has received, one of REASONS; None if there is none."""
        return self.received or (PAUSE if time.monotonic() >= self.pause_at else None)

    def watch_siblings(self) -> None:
        """From now on, watch the other workers of this node's agent that run now: see `look_at_siblings`.

        Watches none if there is no agent, or if the system has no pidfds or no /proc.
        """
        self.siblings = open_siblings(self.launch.agent_pid)

    def watch_stop_file(self, path: Path, note_stop: Callable[[], None] | None = None) -> None:
        """Treat a file at `path` as a request to stop.

        `note_stop`, unless it is None, is called by `exit_before_training` on rank 0.
        """
        self.stop_file, self.note_stop = path, note_stop

        def look() -> None:
            # False also if a network folder is unreachable for a moment.
            while not os.path.exists(path):
                time.sleep(POLL_S)

        self.stop_found = start(look)  # in a thread of its own, because the disk may hang

    def defer(self) -> None:
        """From now on, do not exit at a first request to stop, but keep it until all ranks agree on it.

        The ranks exchange their requests in each step.
        """
        self.deferred = True

    def remove_stop_file(self) -> None:
        """Remove the file STOP, if there is one, so that the same command continues the run.

        If the file cannot be removed, that is logged, not raised.
        """
        try:
            if self.stop_file:
                self.stop_file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"{self.stop_file} cannot be removed ({error.strerror}) and will stop the next run")

    def exit_before_training(self, reason: str) -> NoReturn:
        """Exit without saving, because all ranks have agreed on the request `reason` before the first step.

        Rank 0 first prints a line, removes the file STOP, and calls `note_stop`.
        """
        if self.launch.rank == 0:
            write_stderr(before_first_step(reason))
            try_within(STORAGE_S, self.remove_stop_file)
            try_within(STORAGE_S, self.note_stop or bool)
        self.exit.exit_process(StopRequested(reason))

    def hand_over(self, handler: Callable[[int, FrameType | None], None]) -> None:
        """Stop listening, so that `handler` receives all further SIGNALS. No signal is lost.

        Call this in the main thread.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in SIGNALS:
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.closed.set()
        os.write(self.write_end, b"\0")  # wakes the thread
        self.thread.join()

    def listen(self) -> None:
        while True:
            self.wait()
            self.read_signals()  # also a signal that came just before `hand_over`
            if self.closed.is_set():
                return
            if self.launch.is_orphan():
                self.exit.exit_at_once()
            if self.stop_found.done() and not self.reason:
                self.request("STOP")
            self.look_at_siblings()
            self.exit.exit_if_nccl_stuck()
            if self.deferred and self.launch.world_size > 1 and self.reason not in (None, *JOB_ENDS):
                since = max(self.received_at, self.exit.progress_at)
                if time.monotonic() - since > self.exit.timeout_s:  # training is stuck
                    number = signal.Signals[self.reason]
                    self.exit.exit_beside_main_thread(SignalReceived(number, is_first=False))

    def wait(self) -> None:
        """Wait, at most POLL_S seconds, until a signal comes or a worker of the same agent exits.

        Workers that have exited are moved from `siblings` to `exited_at`.
        """
        timeout_s = POLL_S / 4 if self.exited_at else POLL_S
        for rank in wait_readable({READ_END: self.read_end, **self.siblings}, timeout_s):
            if rank != READ_END:
                self.exited_at[rank] = time.monotonic()
                del self.siblings[rank]

    def read_signals(self) -> None:
        while wait_readable({READ_END: self.read_end}, 0.0):
            number = os.read(self.read_end, 1)[0]
            self.has_sigterm = self.has_sigterm or number == signal.SIGTERM
            now = time.monotonic()
            if number in SIGNALS and not (self.reason and now - self.received_at < REPEAT_S):
                self.receive(signal.Signals(number))
                self.received_at = now

    def receive(self, number: signal.Signals) -> None:
        is_first = self.received in (None, "STOP")
        if is_first and number == signal.SIGUSR1 and not self.deferred:
            self.request(number.name)
        elif not (is_first and self.deferred):
            self.exit.exit_at_once(SignalReceived(number, is_first))
        self.received = number.name

    def request(self, reason: str) -> None:
        """Keep the request `reason`, SIGUSR1 or STOP, until all ranks agree on it.

        If this process is the only worker, and training has not begun, exit now instead.
        """
        if not self.deferred and self.launch.world_size == 1:
            self.exit_before_training(reason)
        self.received = self.received or reason

    def look_at_siblings(self) -> None:
        """Exit if a watched worker failed, lost a peer, timed out, or exited without an exit reason.

        This happens at the earliest PEER_GRACE_S seconds after the worker's exit. Also exits if the TCPStore
        does not answer for UNKNOWN_GRACE_S seconds after a worker's exit. Workers that ended in other ways
        are removed from `exited_at`.
        """
        for rank, exited_at in list(self.exited_at.items()):
            waited_s = time.monotonic() - exited_at
            if waited_s > PEER_GRACE_S:
                is_known, reason = self.exit.read_exit_reason(rank)
                if reason and not reason["why"].startswith(DISORDER):
                    del self.exited_at[rank]
                elif is_known or waited_s > UNKNOWN_GRACE_S:
                    why = reason["why"] if reason else "vanished"
                    self.exit.exit_beside_main_thread(PeerLost(f"worker {rank} {why}"))
