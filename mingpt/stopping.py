"""How a worker hears that it should stop, whatever its main thread is doing.

In a thread: Python runs signal handlers in the main thread alone, and not while that waits inside a collective. Nothing here imports torch,
so that a worker listens before it does anything that takes time.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

REQUESTS = ("SIGTERM", "SIGINT", "SIGUSR1", "STOP")  # in order of precedence where workers hear different ones
POLL_S = 0.2
SAME_REQUEST_S = 0.3  # an agent that is told to stop tells its workers, who may have been told already


class Listener:
    """Notes the first request to stop in `asked`; leaves at once for a second, and for the first while nobody can agree on it.

    Also ends this process when the agent that started it is gone, so that no worker is left behind.
    """

    def __init__(self, agent: int | None) -> None:
        self.agent = agent
        self.asked: str | None = None
        self.agreeing = False  # whether the workers look at `asked` after every step
        self.stop_file: Path | None = None
        self.say_farewell: Callable[[str], None] = lambda why: None
        self.reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for name in REQUESTS[:3]:
            signal.signal(getattr(signal, name), lambda *_: None)  # the byte in the pipe is what counts
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        heard_at = 0.0
        while True:
            if select.select([self.reading], [], [], POLL_S)[0]:
                number = os.read(self.reading, 1)[0]
                now = time.monotonic()
                if not (self.asked and now - heard_at < SAME_REQUEST_S):
                    self.hear(signal.Signals(number))
                    heard_at = now
            if self.agent and os.getppid() != self.agent:
                os._exit(1)
            try:
                if self.stop_file and self.stop_file.exists():
                    self.asked = self.asked or "STOP"
            except OSError:
                pass  # a network folder that is away for a moment; look again

    def hear(self, number: signal.Signals) -> None:
        if self.asked or not (self.agreeing or number == signal.SIGUSR1):
            first = self.asked is None
            self.say_farewell(f"told to stop by {number.name}")
            os._exit(0 if first and self.agent is None else 128 + number)
        self.asked = number.name
