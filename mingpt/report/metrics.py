"""The metrics of a training step, and `Sink`, the interface of a place that metrics go to.

A metric is a function of StepStats, registered in METRICS. A `Sink` is a file, a terminal, a plot,
TensorBoard or a tracker.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Dense bfloat16 peak in FLOP/s (float16 on T4 and V100, which have no bfloat16) by the first of these parts
# of the device's name. From NVIDIA's data sheets; those of H100 and later give twice this, for sparse ones.
PEAK_FLOPS = {
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "Tesla T4": 65e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}
Values = Mapping[str, float]


@dataclass(frozen=True)
class StepStats:
    """The statistics of a step. Times are means over the steps since the last record, in seconds."""

    step: int
    loss: float  # nats per token, mean over the step
    lr: float
    grad_norm: float  # before clipping
    windows_seen: int  # since the run began; a window is block_size + 1 tokens
    block_size: int
    batch_size: int  # windows per step
    step_s: float  # without evaluation and snapshots
    data_s: float  # the part of step_s spent on fetching batches
    flops_per_token: float  # of a forward and backward pass
    world_size: int
    device_name: str
    loss_scale: float | None = None  # of float16, after the step


def tokens_per_s(stats: StepStats) -> float:
    return stats.batch_size * stats.block_size / stats.step_s


def model_flops_utilization(stats: StepStats) -> float | None:
    """Return the FLOP/s as a share of the devices' peak (Chowdhery et al. 2022); None if unknown."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in stats.device_name), None)
    return stats.flops_per_token * tokens_per_s(stats) / stats.world_size / peak if peak else None


# Each function returns its metric's value; a value of None or not finite is left out of the record.
METRICS: dict[str, Callable[[StepStats], float | None]] = {
    "train/loss": lambda stats: stats.loss,
    "lr": lambda stats: stats.lr,
    "grad_norm": lambda stats: stats.grad_norm,
    "tokens": lambda stats: stats.windows_seen * stats.block_size,
    "tokens_per_s": tokens_per_s,
    "step_s": lambda stats: stats.step_s,
    "data_s": lambda stats: stats.data_s,
    "mfu": model_flops_utilization,
    "loss_scale": lambda stats: stats.loss_scale,
}


def training_values(stats: StepStats) -> dict[str, float]:
    """Return {name: value} of every metric in METRICS whose value is known and finite."""
    values = {name: metric(stats) for name, metric in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class RunInfo:
    """The facts on the run and on this generation from which a Sink, a place for metrics, is built."""

    run_dir: Path
    max_steps: int
    first_step: int  # the step that this generation starts from
    restarts: list[int]  # steps from which generations after the first went on
    entropy_floor: float | None  # entropy of the validation part in nats per token, if it is known
    may_write: Callable[[], bool] = lambda: True  # false once another job or generation has the folder
    is_main: bool = True  # whether this is rank 0; false for another run folder, on another node's disk
    run_id: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # the configuration; URLs without credentials
    generation: int = 1  # its number in run.json
    parameters: int = 0  # number of the model's parameters; 0 if not known


class Sink:
    """A place for metrics. A subclass overrides methods it needs, and ignores values it does not know."""

    def log(self, step: int, values: Values) -> None:
        """Take the values of metrics after `step`."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Take the text `name`, such as the sample text of an evaluation, after `step`."""

    def on_step(self, step: int) -> None:
        """Note that a step is complete; there need not be values for it."""

    def close(self) -> None:
        """Finish when the run ends, fails or is stopped. A generation that is killed does not call it."""
