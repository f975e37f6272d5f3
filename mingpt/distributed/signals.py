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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mingpt.base.errors import StopRequested
from mingpt.base.processes import open_siblings, wait_readable
from mingpt.distributed.ends import DISORDER
from mingpt.distributed.exit import (
    JOB_ENDS,
    PAUSE,
    PeerLost,
    ProcessExit,
    SignalReceived,
    before_first_step,
    write_stderr,
)
from mingpt.distributed.launch import Launch

log = logging.getLogger(__name__)

# In order of precedence, if ranks have received different requests.
REASONS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", *JOB_ENDS)
SIGNALS = [
    signal.Signals[name]
    for name in REASONS
    if name.startswith("SIG")
    if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # nohup ignores it
]
POLL_S = 0.2
# Signals this close together are one request: the agent passes on a signal that workers may have got, too.
REPEAT_S = 1.0
# The main thread has this time to notice a lost peer by itself, because the backend gives a reason.
PEER_GRACE_S = 0.3
# The wait for the exit reason of a peer if the store does not answer: the store's host may have finished, as
# all workers have.
UNKNOWN_GRACE_S = 5.0
READ_END = -1  # the pipe's key among the ranks whose pidfds are polled


class StopSignal:
    """Listens for requests to stop, in a thread of its own, and keeps the request in `reason`.

    Before `defer`, which is called when training begins, a signal other than SIGUSR1 ends this process at
    once. SIGUSR1 or a file STOP ends a single worker at once; several workers first agree. After `defer`, a
    request is only kept until all ranks have agreed on it. A second signal, more than REPEAT_S seconds after
    the first, ends this process at once; a file STOP or trainer.pause_after does not count as the first.

    The thread works even while the main thread is stuck. It also ends this process if torchrun's agent is
    gone, if another worker of the agent was lost, or if a collective on GPUs has waited for
    trainer.timeout_s; and if a signal other than SIGUSR1 waits while no collective has ended for that time.
    """

    def __init__(self, launch: Launch, process_exit: ProcessExit) -> None:
        self.launch, self.exit = launch, process_exit
        self.received: str | None = None
        self.pause_at = math.inf  # by the monotonic clock; never before `defer`
        self.deferred = False
        self.has_sigterm = False  # whether SIGTERM has come, also right after another signal
        self.stop_file: Path | None = None
        self.note_stop: Callable[[], None] | None = None  # records a stop before the first step in run.json
        self.received_at = float("-inf")
        self.siblings: dict[int, int] = {}  # rank -> pidfd of each other worker of this agent that runs
        self.exited_at: dict[int, float] = {}  # rank of one that does not -> when this was seen
        self.closed = threading.Event()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte that Python writes to the pipe counts
        signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        faulthandler.register(signal.SIGUSR2, 2)  # to stderr, until there is a run folder
        # mingpt.launch.agent blocks these signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*SIGNALS, signal.SIGUSR2])
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    @property
    def reason(self) -> str | None:
        """The request to stop, such as "SIGTERM" or "STOP" (one of REASONS); None without one."""
        return self.received or (PAUSE if time.monotonic() >= self.pause_at else None)

    def watch_siblings(self) -> None:
        """From now on, exit if another worker of this node's agent fails, or exits without an exit reason."""
        self.siblings = open_siblings(self.launch.agent_pid)

    def watch_stop_file(self, path: Path, note_stop: Callable[[], None] | None = None) -> None:
        """Treat a file at `path` as a request to stop. `exit_before_training` calls `note_stop` on rank 0."""
        self.stop_file, self.note_stop = path, note_stop

    def defer(self) -> None:
        """From now on, do not exit at a request: keep it until all ranks agree on it, as after each step."""
        self.deferred = True

    def remove_stop_file(self) -> None:
        """Remove the file STOP, if any, so that the same command continues the run. A failure is logged."""
        try:
            if self.stop_file:
                self.stop_file.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"{self.stop_file} cannot be removed ({error.strerror}) and will stop the next run")

    def exit_before_training(self, reason: str) -> NoReturn:
        """Exit without saving, because all ranks have agreed to stop before the first step."""
        if self.launch.rank == 0:
            self.remove_stop_file()
            if self.note_stop is not None:
                self.note_stop()
            write_stderr(before_first_step(reason))
        self.exit.exit_process(StopRequested(reason))

    def hand_over(self, handler: Callable[[int, FrameType | None], None]) -> None:
        """Stop listening; `handler` receives further signals. No signal is lost. For the main thread only."""
        for number in SIGNALS:
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.closed.set()
        os.write(self.write_end, b"\0")  # wakes the thread
        self.thread.join()

    def listen(self) -> None:
        while True:
            self.wait()
            self.read_signals()  # also a signal just before `hand_over`
            if self.closed.is_set():
                return
            if self.launch.is_orphan():
                self.exit.exit_at_once()
            # False also if a network folder is unreachable for a moment; the next turn looks again.
            is_there = self.stop_file is not None and os.path.exists(self.stop_file)
            if is_there and not self.reason:
                self.request("STOP")
            self.look_at_siblings()
            self.exit.exit_if_nccl_stuck()
            if self.deferred and self.launch.world_size > 1 and self.reason not in (None, *JOB_ENDS):
                since = max(self.received_at, self.exit.progress_at)
                if time.monotonic() - since > self.exit.timeout_s:  # nothing has moved
                    number = signal.Signals[self.reason]
                    self.exit.exit_beside_main_thread(SignalReceived(number, is_first=False))

    def wait(self) -> None:
        """Wait, at most POLL_S seconds, until a signal comes or a worker of the same agent exits."""
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
        """Keep a request, SIGUSR1 or STOP, until all ranks agree. Before `defer`, a single rank exits."""
        if not self.deferred and self.launch.world_size == 1:
            self.exit_before_training(reason)
        self.received = self.received or reason

    def look_at_siblings(self) -> None:
        """Exit if another worker of this node's agent failed, lost a peer or was killed."""
        for rank, exited_at in list(self.exited_at.items()):
            waited_s = time.monotonic() - exited_at
            if waited_s > PEER_GRACE_S:
                is_known, reason = self.exit.read_exit_reason(rank)
                if reason and not reason["why"].startswith(DISORDER):
                    del self.exited_at[rank]
                elif is_known or waited_s > UNKNOWN_GRACE_S:
                    why = reason["why"] if reason else "vanished"
                    self.exit.exit_beside_main_thread(PeerLost(f"worker {rank} {why}"))
