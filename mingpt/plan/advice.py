"""Which strategies there are to choose from, which fit into the memory, and what to change if none does."""

import dataclasses
from typing import Any

from mingpt.plan.memory import estimate
from mingpt.plan.workload import Workload

MAX_WORKERS = 1 << 16

# Changes to the trainer section, from the simplest to the one that needs least.
STRATEGIES: list[dict[str, Any]] = [
    {"parallel": "ddp"},
    {"parallel": "ddp", "shard_optimizer": True},
    {"parallel": "fsdp"},
    {"parallel": "fsdp", "recompute": "block"},
    {"parallel": "fsdp", "recompute": "block", "fsdp_param_dtype": "bfloat16"},
]


def strategies(work: Workload) -> list[tuple[str, Workload]]:
    """(settings as a command line spells them, the job with them)."""
    plain = {"parallel": "ddp", "shard_optimizer": False, "fsdp_param_dtype": None}
    found = []
    for changes in STRATEGIES:
        if changes.get("fsdp_param_dtype") and work.dtype != "bfloat16":
            continue
        label = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        found.append((label, work.with_trainer(**plain | changes)))
    return found


def advise(work: Workload, limit_bytes: int) -> str:
    """One sentence: the first strategy that fits, or what makes the last one fit."""
    for label, one in strategies(work):
        if fits(one, limit_bytes):
            return f"{spell(label)} fits"
    label, smallest = strategies(work)[-1]
    ways = []
    if work.config.trainer.micro_batch_size > 1:
        size = largest_micro_batch(smallest, limit_bytes)
        if size:
            ways.append(f"trainer.micro_batch_size={size}")
    workers = fewest_workers(smallest, limit_bytes)
    if workers:
        ways.append(f"{workers:,} workers")
        if workers > work.micro_batches:
            ways[-1] += f" with a trainer.batch_size of at least {workers * micro_batch_size(work):,}"
    if not ways:
        return (
            "no strategy fits, and neither smaller micro-batches nor more workers help: train a smaller "
            "model, a shorter data.block_size, or on workers with more memory"
        )
    return f"no strategy fits; {spell(label)} does with {' or '.join(ways)}"


def spell(label: str) -> str:
    """The settings with their section."""
    return " ".join(f"trainer.{word}" for word in label.split())


def micro_batch_size(work: Workload) -> int:
    return work.config.trainer.micro_batch_size


def fits(work: Workload, limit_bytes: int) -> bool:
    return estimate(work).peak_bytes <= limit_bytes


def largest_micro_batch(work: Workload, limit_bytes: int) -> int | None:
    """The largest smaller micro_batch_size, a divisor of the present one, with which the job fits."""
    present = micro_batch_size(work)
    for size in range(present - 1, 0, -1):
        if present % size == 0 and fits(work.with_trainer(micro_batch_size=size), limit_bytes):
            return size
    return None


def fewest_workers(work: Workload, limit_bytes: int) -> int | None:
    """More workers, in steps of a factor of two, with which the job fits; None if no number does."""
    workers = 2 * work.workers
    while workers <= MAX_WORKERS:
        batch_size = max(work.config.trainer.batch_size, workers * micro_batch_size(work))
        larger = dataclasses.replace(work.with_trainer(batch_size=batch_size), workers=workers)
        if fits(larger, limit_bytes):
            return workers
        workers *= 2
    return None
