"""Requests to stop: SIGTERM, SIGINT, SIGUSR1, or a file STOP in run_dir.

A thread receives them: Python runs signal handlers in the main thread only, and not while that waits inside a
collective. torch is not imported here, so that a worker listens before it does anything that takes time.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

# In order of precedence where ranks got different ones.
REASONS = ("SIGTERM", "SIGINT", "SIGUSR1", "STOP")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.2
# Signals this close together are one request: an agent that gets one passes it on to its workers.
REPEAT_S = 1.0


class StopSignal:
    """Keeps the first request to stop in `reason`.

    While `deferred`, the first request waits until all ranks have agreed on it after a step. Otherwise, and
    at a second request, `exit_now(signal, is_first)` is called, which is ProcessExit.exit_on_signal. Also
    ends this process when its agent is gone.
    """

    def __init__(self, agent_pid: int | None, exit_now: Callable[[signal.Signals, bool], None]) -> None:
        self.agent_pid, self.exit_now = agent_pid, exit_now
        self.reason: str | None = None
        self.deferred = False
        self.stop_file: Path | None = None
        self.closed = threading.Event()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the byte that Python writes to the pipe is what counts
        signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # mingpt.agent blocks it
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def defer(self, stop_file: Path) -> None:
        """From here on the training loop reads `reason` after each step; `stop_file` is a request too."""
        self.stop_file = stop_file
        self.deferred = True

    def close(self) -> None:
        """Stop listening; further signals have their default effect."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self.closed.set()
        os.write(self.write_end, b"\0")  # wakes the thread
        self.thread.join()

    def listen(self) -> None:
        received_at = 0.0
        while True:
            readable = select.select([self.read_end], [], [], POLL_S)[0]
            if self.closed.is_set():
                return
            if readable:
                number = os.read(self.read_end, 1)[0]
                now = time.monotonic()
                if not (self.reason and now - received_at < REPEAT_S):
                    self.receive(signal.Signals(number))
                    received_at = now
            if self.agent_pid and os.getppid() != self.agent_pid:
                os._exit(1)
            try:
                if self.stop_file and self.stop_file.exists():
                    self.reason = self.reason or "STOP"
            except OSError:
                pass  # a network folder that is unreachable for a moment; it is tried again

    def receive(self, number: signal.Signals) -> None:
        if self.reason or not (self.deferred or number == signal.SIGUSR1):
            self.exit_now(number, self.reason is None)
        self.reason = number.name
