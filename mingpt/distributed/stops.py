"""Requests to stop a training loop of your own, which has no Worker."""

import atexit
import math
import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from mingpt.config.settings import to_seconds
from mingpt.distributed.exit import PAUSE
from mingpt.distributed.group import BackgroundGroup
from mingpt.distributed.signals import REASONS, REPEAT_S


class StopSignal:
    """Keeps a request to stop, which `agreed` returns. Signals are received until `close` is called.

    A request is SIGTERM, SIGINT or SIGUSR1, or that the time `pause_after` has passed since the construction:
    a finite number of seconds, at least 0, or a text such as 5h30m; None means never. A second signal, more
    than a second after the first one, does what it does without a StopSignal. If torch.distributed is
    initialised, all ranks construct a StopSignal together. In a `with` block, `close` is called at the end.
    Raises ValueError for any other `pause_after`, or if not constructed in the main thread.
    """

    def __init__(self, pause_after: float | str | None = None) -> None:
        self.received: str | None = None
        self.received_at = math.inf
        self.pause_at = math.inf if pause_after is None else time.monotonic() + to_seconds(pause_after)
        self.earlier: dict[int, Any] = {}  # the handlers of before
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self.earlier[number] = signal.signal(number, self.receive)
        self.group = BackgroundGroup.of_all()
        atexit.register(self.leave_group)

    def leave_group(self) -> None:
        """Free the process group at the program's end, before Python removes the signal handlers.

        The handlers keep this StopSignal alive. If they were the last to let go of the group, a thread of
        gloo could end the process with SIGABRT.
        """
        self.group = BackgroundGroup(0, 1)

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.received_at = signal.Signals(number).name, now
        elif now > self.received_at + REPEAT_S:  # a launcher may repeat what the terminal has sent
            self.close()
            os.kill(os.getpid(), number)

    def agreed(self) -> str | None:
        """Return a request that a rank has received, the same on all ranks; None if no rank has received any.

        A request is the name of a signal or "trainer.pause_after"; of several, SIGTERM comes first, then
        SIGINT. Collective: all ranks call this method together, for example once per step.
        """
        own = self.received or (PAUSE if time.monotonic() >= self.pause_at else None)
        requests = self.group.all_gather_object(own)
        return next((name for name in REASONS if name in requests), None)

    def close(self) -> None:
        """Restore the signal handlers that were set before the construction."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
