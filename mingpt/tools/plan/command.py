"""What does a run need, and what fits: memory per worker, bytes sent and disk, by strategy.

    python -m mingpt plan [CONFIG.yaml] [section.key=value ...] [--workers N] [--gpu_memory 80GB]

Nothing is trained and no large tensor allocated. With --gpu_memory, or trainer.device=cuda, workers are GPUs;
else they share this machine's memory. Exit code 0, also where nothing fits; 2 for a mistake.
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
    """(settings as they are on a command line, the job with these settings), strategy by strategy."""
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
    """One sentence: the first strategy that fits, or the micro-batch size with which the last one does."""
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
    """The lines to print. `limit_source` names what has the limit."""
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
    """Lines on the model, its state, a step and the data."""
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
    """The size in the unit that suits it."""
    return ByteSize(size).human_readable(decimal=True, separator=" ")


def align(rows: list[list[str]]) -> list[str]:
    """The rows as lines with columns as wide as their widest cell; the first column is left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(text: str) -> int:
    """The bytes that "80GB", "79.6 GiB" or a plain number means. Raises ValueError, or ArgumentTypeError."""
    found: int = TypeAdapter(ByteSize).validate_python(text)
    if found < 1e6:
        raise ArgumentTypeError(f"{text} means {found} bytes: write the unit, as in 80GB")
    return found


def memory_limit(config: Config, workers: int, gpu_memory: int | None) -> tuple[int, str, bool]:
    """(bytes for a worker, words on their source, whether it runs on a CPU). Raises UserError."""
    if gpu_memory is not None:
        return gpu_memory, "a GPU has", False
    if config.trainer.device == "cuda":
        raise UserError("how much memory does a GPU have? Give --gpu_memory, such as --gpu_memory 80GB")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // workers, f"this machine's among {workers:,}:", True


def planned_dtype(config: Config, on_cpu: bool) -> str:
    """The type that trainer.dtype means; auto means bfloat16 on a GPU, and on a CPU that supports it."""
    if not on_cpu and config.trainer.dtype == "auto":
        return "bfloat16"
    return str(resolve_dtype(config.trainer.dtype, torch.device("cpu"))).removeprefix("torch.")


def plan(config: Config, workers: int, gpu_memory: int | None) -> list[str]:
    """The lines to print. Raises UserError."""
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
