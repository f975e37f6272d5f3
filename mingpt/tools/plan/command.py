"""Estimate what a run needs, by strategy, and what fits: memory per worker, bytes sent, disk.

    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]

Nothing is trained and no large tensor allocated. With --gpu_memory, which trainer.device=cuda needs, each
worker has a GPU; else all share this machine's memory. Exit code 0, also if nothing fits; 2 for a mistake.
"""

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers
from mingpt.config.cli import parse
from mingpt.distributed.device import resolve_dtype
from mingpt.model import choose_compile
from mingpt.tools.plan.costs import bytes_sent, estimate, held
from mingpt.tools.plan.workload import Workload, measure_data

# Changes to the trainer section, from the simplest strategy to the one that needs least memory.
STRATEGIES: list[dict[str, Any]] = [
    {"parallel": "ddp"},
    {"parallel": "ddp", "shard_optimizer": True},
    {"parallel": "fsdp"},
    {"parallel": "fsdp", "recompute": "block"},
    {"parallel": "fsdp", "recompute": "block", "fsdp_param_dtype": "bfloat16"},
]
COLUMNS = {
    "weights": ("weights",),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "work", "gathered"),
    "snapshots": ("snapshots",),
    "other": ("process", "freed"),
}


def strategies(work: Workload) -> list[tuple[str, Workload]]:
    """Return (trainer settings as "key=value ...", the job with them) per strategy, the simplest first."""
    plain = {"parallel": "ddp", "shard_optimizer": False, "fsdp_param_dtype": None}
    return [
        (
            " ".join(f"{key}={str(value).lower()}" for key, value in changes.items()),
            work.with_trainer(**plain | changes),
        )
        for changes in STRATEGIES
        if work.dtype == "bfloat16" or "fsdp_param_dtype" not in changes
    ]


def advise(work: Workload, limit_bytes: int) -> str:
    """Return a sentence: the first strategy that fits, else a micro-batch size that does, else other ways."""
    for label, one in strategies(work):
        words = " ".join(f"trainer.{word}" for word in label.split())
        if estimate(one).peak_bytes <= limit_bytes:
            return f"{words} fits"
    present = work.config.trainer.micro_batch_size
    for size in [size for size in range(present - 1, 0, -1) if present % size == 0]:
        if estimate(one.with_trainer(micro_batch_size=size)).peak_bytes <= limit_bytes:
            return f"no strategy fits; {words} does with trainer.micro_batch_size={size}"
    return (
        "no strategy fits: try more workers with a larger trainer.batch_size, a smaller model, a shorter "
        "data.block_size, or workers with more memory"
    )


def render(work: Workload, limit_bytes: int, limit_source: str) -> list[str]:
    """Return the lines to print: job, costs by strategy, advice. `limit_source` says whose the limit is."""
    planned = [(label, one, estimate(one)) for label, one in strategies(work)]
    rows = [["", *COLUMNS, "total", "sent exact", "sent fast", "fits"]]
    for label, one, memory in planned:
        terms = memory.terms()
        sizes = [sum(terms.get(name, 0) for name in names) for names in COLUMNS.values()]
        sent = [bytes_sent(one.with_trainer(reduction=reduction)) for reduction in ("exact", "fast")]
        sizes += [memory.peak_bytes, *sent]
        fitting = "yes" if memory.peak_bytes <= limit_bytes else "no"
        rows.append([label, *(f"{size / 1e9:,.3f}" for size in sizes), fitting])
    lines = [
        *describe(work),
        "",
        f"memory of a worker at its peak, in GB; {limit_source} {limit_bytes / 1e9:,.3f}",
        *align(rows),
        "",
        "sent: GB that a worker sends per step under trainer.reduction=exact or fast",
    ]
    if not work.on_cpu:
        lines.append(
            f"a GPU's memory: a sum of tensors and 1 GB of context, not measured; beside it worker 0 needs "
            f"{spelled(held(work)['snapshots'])} of the host's memory for snapshots, less where sharded"
        )
    return [*lines, advise(work, limit_bytes)]


def describe(work: Workload) -> list[str]:
    """Return lines on the model, its state, a step's tokens, whether it is compiled, and the data."""
    config = work.config
    snapshots = config.snapshot.keep_last + config.snapshot.keep_best
    workers = "1 worker" if work.workers == 1 else f"{work.workers:,} workers"
    device = "CPU" if work.on_cpu else "GPU"
    lines = [
        f"{config.model.arch} with {work.parameters:,} parameters, of which a block has "
        f"{work.block_parameters:,}; {work.dtype} on {workers}, {device}",
        f"state (weights and {config.optimizer.name}): {spelled(work.state_bytes)}; on disk so much per "
        f"snapshot, up to {snapshots} kept: {spelled(snapshots * work.state_bytes)}",
        f"step: {work.micro_batches * work.tokens_per_micro_batch:,} tokens in {work.micro_batches:,} "
        f"micro-batches, at most {work.rounds:,} of a worker",
        str(choose_compile(config, work.vocab_size, "cpu" if work.on_cpu else "cuda")),
    ]
    if work.train_tokens is None:
        return [*lines, "data: not known, so neither are steps per epoch"]
    windows = max(0, work.train_tokens - 1) // config.data.block_size
    per_epoch = windows / config.trainer.batch_size
    return [
        *lines,
        f"data: {work.train_tokens:,} tokens, vocabulary of {work.vocab_size:,}; {per_epoch:,.1f} steps per "
        f"epoch, {config.trainer.max_steps:,} steps in all",
    ]


def spelled(size: float) -> str:
    """Return a number of bytes with the decimal unit that suits it, as "1.5 GB"."""
    return ByteSize(size).human_readable(decimal=True, separator=" ")


def align(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines of aligned columns: the first one at its left edge, others at their right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(text: str) -> int:
    """Return the bytes of a size such as "80GB". ValueError for other text, ArgumentTypeError below 1 MB."""
    found: int = TypeAdapter(ByteSize).validate_python(text)
    if found < 1e6:
        raise ArgumentTypeError(f"{text} means {found} bytes: write the unit, as in 80GB")
    return found


def memory_limit(config: Config, workers: int, gpu_memory: int | None) -> tuple[int, str, bool]:
    """Return (bytes per worker, what has them, whether on CPUs). UserError for device=cuda without a size."""
    if gpu_memory is not None:
        return gpu_memory, "a GPU has", False
    if config.trainer.device == "cuda":
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // workers, f"this machine's among {workers:,}:", True


def planned_dtype(config: Config, on_cpu: bool) -> str:
    """Return the name of trainer.dtype; auto is bfloat16 on a GPU, or if fast on this CPU, else float32."""
    if not on_cpu and config.trainer.dtype == "auto":
        return "bfloat16"
    return str(resolve_dtype(config.trainer.dtype, torch.device("cpu"))).removeprefix("torch.")


def plan(config: Config, workers: int, gpu_memory: int | None) -> list[str]:
    """Return the lines to print. Raises UserError for a bad number of workers, or unknown memory or data."""
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    check_workers(config, workers)
    limit, source, on_cpu = memory_limit(config, workers, gpu_memory)
    vocab_size, train_tokens = measure_data(config)
    work = Workload(config, vocab_size, workers, on_cpu, planned_dtype(config, on_cpu), train_tokens)
    return render(work, limit, source)


def main(arguments: Sequence[str]) -> int:
    usage = "%(prog)s [CONFIG.yaml] [section.key=value ...] [options]"
    parser = CommandParser("python -m mingpt plan", __doc__, usage)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="of the job (default 1)")
    parser.add_argument("--gpu_memory", type=size, metavar="SIZE", help="of each worker's GPU, such as 80GB")
    options, settings = parser.parse_known_args(arguments)
    write_lines(plan(parse(settings), options.workers, options.gpu_memory))
    return 0
