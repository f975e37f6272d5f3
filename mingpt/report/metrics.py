"""The metrics of a training step: a function of StepStats for each, registered in METRICS."""

from collections.abc import Callable
from dataclasses import dataclass

# Dense bfloat16 peak in FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class StepStats:
    """What is known after a step. Rates and times are per step, over the steps since the last record."""

    step: int
    loss: float  # nats per token, mean over the step
    lr: float
    grad_norm: float  # before clipping
    windows_seen: int
    block_size: int
    batch_size: int  # windows per step
    step_s: float  # without evaluation and snapshots
    data_s: float  # of it, spent on fetching batches
    flops_per_token: float
    world_size: int
    device_name: str


def tokens_per_s(stats: StepStats) -> float:
    return stats.batch_size * stats.block_size / stats.step_s


def model_flops_utilization(stats: StepStats) -> float | None:
    """Share of the devices' peak (Chowdhery et al. 2022); None where the peak is not known."""
    peak = peak_flops(stats.device_name)
    return stats.flops_per_token * tokens_per_s(stats) / stats.world_size / peak if peak else None


def peak_flops(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


# A metric that is None for these stats is left out of the record.
METRICS: dict[str, Callable[[StepStats], float | None]] = {
    "train/loss": lambda stats: stats.loss,
    "lr": lambda stats: stats.lr,
    "grad_norm": lambda stats: stats.grad_norm,
    "tokens": lambda stats: stats.windows_seen * stats.block_size,
    "tokens_per_s": tokens_per_s,
    "step_s": lambda stats: stats.step_s,
    "data_s": lambda stats: stats.data_s,
    "mfu": model_flops_utilization,
}


def training_values(stats: StepStats) -> dict[str, float]:
    """{name: value} of every metric that is known."""
    values = {name: metric(stats) for name, metric in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}
