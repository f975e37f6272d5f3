"""Learning-rate schedules: a function of progress for each, registered in SCHEDULES."""

import math
from collections.abc import Callable

from mingpt.config import OptimizerConfig


def cosine(progress: float) -> float:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    return 1.0 - progress


# From progress after warm-up, 0 to 1, to a factor of 1 to 0 between peak and minimum; `optimizer.schedule`.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "linear": linear,
}


def learning_rate(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of the update that completes `step` (from 1): linear warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    floor = config.min_lr_fraction
    return config.learning_rate * (floor + (1 - floor) * SCHEDULES[config.schedule](progress))
