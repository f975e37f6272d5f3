"""Seconds per step between two records, without what is no part of a step."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepTimer:
    """Measures from the last `reset` on; `data_s` is added to by whoever fetches batches."""

    def __init__(self, step: int) -> None:
        self.reset(step)

    def reset(self, step: int) -> None:
        """Begin to measure after `step`."""
        self.began, self.first_step, self.data_s = time.perf_counter(), step, 0.0

    def exclude(self, work: Callable[[], T]) -> T:
        """Do something that is no part of a step's time."""
        began = time.perf_counter()
        result = work()
        self.began += time.perf_counter() - began
        return result

    def seconds_per_step(self, step: int) -> tuple[float, float]:
        """(total, fetching data) since `reset`, per step up to this one."""
        steps = step - self.first_step
        return (time.perf_counter() - self.began) / steps, self.data_s / steps
