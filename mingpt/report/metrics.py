"""The metrics of a training step, and `Sink`, the interface of a place that metrics go to.

A metric of a step is a function of StepStats, registered in METRICS. A `Sink` is a file, a terminal, a plot,
TensorBoard or a tracker.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mingpt.config import Config
from mingpt.data import Corpus
from mingpt.distributed import GenerationEnd
from mingpt.model import parameter_shapes

# The peak FLOP/s of dense bfloat16 matrices (float16 on T4 and V100, which have no bfloat16) by a part of the
# device's name; the first part that matches counts. Source: NVIDIA's data sheets. The data sheets of H100 and
# later GPUs give twice these values, for sparse matrices.
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
    """The statistics of a training step.

    `step_s` and `data_s` are the mean seconds per step since the last record, or since training began.
    """

    step: int
    loss: float  # nats per token, mean over the step
    lr: float
    grad_norm: float  # before clipping
    windows_seen: int  # read by the whole run so far; a window is block_size + 1 tokens
    block_size: int
    batch_size: int  # windows per step
    step_s: float  # without evaluation and snapshots
    data_s: float  # the part of step_s spent on fetching batches
    flops_per_token: float  # of a forward and backward pass
    world_size: int
    device_name: str
    loss_scale: float | None = None  # after the step; None without float16


def tokens_per_s(stats: StepStats) -> float:
    return stats.batch_size * stats.block_size / stats.step_s


def model_flops_utilization(stats: StepStats) -> float | None:
    """Return the share of the devices' peak FLOP/s that training uses (Chowdhery et al. 2022).

    Returns None if PEAK_FLOPS does not have the device.
    """
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


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known about a run when a generation (the workers between two restarts) begins to train."""

    config: Config
    corpus: Corpus
    run_id: str
    step: int  # the step from which the run goes on; 0 in a fresh run
    is_restart: bool = False  # false in a job's first generation
    # The step of the newest snapshot without a known fault that any node has on disk; 0 if there is none.
    durable_step: int = 0
    changes: list[str] = field(default_factory=list)  # settings changed on purpose, each "key: old -> new"
    workers: int = 1  # the number of workers
    hosts: list[str] = field(default_factory=list)  # host names of the nodes, in the order of node ranks
    pids: list[int] = field(default_factory=list)  # of the workers on the host of rank 0
    previous: GenerationEnd | None = None  # how the previous generation ended; None if there is no record
    process_began: float = field(default_factory=time.monotonic)  # time.monotonic() when this process began
    job: str = ""  # the job's random token, the same in all its generations
    settings: str = ""  # a digest of the settings that must be the same on all workers of the job
    is_main: bool = True  # true on rank 0; other ranks that report have a run folder on their node's disk
    logged_step: int = 0  # the newest step, not past `step`, that must have a record of metrics; 0 for none
    # Once the claim was removed, or is that of another job or a later generation, `check_claim` raises
    # ClaimLost, and `may_write` returns False.
    check_claim: Callable[[], None] = lambda: None
    may_write: Callable[[], bool] = lambda: True

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @cached_property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        model, block_size = self.config.model, self.config.data.block_size
        shapes = parameter_shapes(model, vocab_size=self.corpus.vocab_size, block_size=block_size)
        return sum(map(math.prod, shapes.values()))


class Sink:
    """A place that metrics go to.

    A subclass overrides the methods that it needs, and ignores values that it does not know.
    """

    def log(self, step: int, values: Values) -> None:
        """Take `values`, {name of the metric: its value after `step`}."""

    def close(self) -> None:
        """Write what is left. `RunLogger.ended` and `RunLogger.failed` call this method."""
