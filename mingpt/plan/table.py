"""A plan as one screen of text."""

from mingpt.model import choose_compile
from mingpt.plan.advice import advise, fits, strategies
from mingpt.plan.memory import Memory, estimate, host_snapshots
from mingpt.plan.speed import Rates, step_seconds
from mingpt.plan.traffic import bytes_sent
from mingpt.plan.workload import Workload

COLUMNS = {
    "weights": ("weights",),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "work", "gathered"),
    "snapshots": ("snapshots",),
    "other": ("process", "freed"),
}


UNITS = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB")]


def render(work: Workload, limit_bytes: int, limit_source: str, rates: Rates | None) -> list[str]:
    """The lines. `limit_source` says what the limit is of."""
    planned = [(label, one, estimate(one)) for label, one in strategies(work)]
    unit = "GB" if max(memory.peak_bytes for _, _, memory in planned) >= 10e9 else "MB"
    rows = [header(rates)]
    for label, one, memory in planned:
        sizes = [*cells(memory), memory.peak_bytes, *traffic(one)]
        fitting = "yes" if fits(one, limit_bytes) else "no"
        rows.append([label, *(in_unit(size, unit) for size in sizes), *seconds(one, rates), fitting])
    return [
        *describe(work),
        "",
        f"memory of a worker at its peak, in {unit}; {limit_source} {in_unit(limit_bytes, unit)}",
        *align(rows),
        "",
        *notes(work, unit, rates),
        advise(work, limit_bytes),
    ]


def describe(work: Workload) -> list[str]:
    """Model, state, step and data."""
    config = work.config
    snapshots = config.snapshot.keep_last + config.snapshot.keep_best
    workers = "1 worker" if work.workers == 1 else f"{work.workers:,} workers"
    device = "CPU" if work.on_cpu else "GPU"
    lines = [
        f"{config.model.arch} with {work.parameters:,} parameters, of which a block has "
        f"{work.block_parameters:,}; {work.dtype} on {workers}, {device}",
        f"state (weights and {config.optimizer.name}): {spelled(work.state_bytes)}; on disk so much per "
        f"snapshot, up to {snapshots} kept: {spelled(snapshots * work.state_bytes)}",
        f"step: {work.tokens_per_step:,} tokens in {work.micro_batches:,} micro-batches, at most "
        f"{work.rounds:,} of a worker; {work.flops_per_step:.2e} FLOP",
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


def header(rates: Rates | None) -> list[str]:
    last = ["step_s", "fits"] if rates else ["fits"]
    return ["", *COLUMNS, "total", "sent exact", "sent fast", *last]


def cells(memory: Memory) -> list[int]:
    """Bytes by column."""
    terms = memory.terms()
    return [sum(terms.get(name, 0) for name in names) for names in COLUMNS.values()]


def traffic(work: Workload) -> list[int]:
    """Bytes that a worker sends per step, by reduction."""
    return [bytes_sent(work.with_trainer(reduction=name)) for name in ("exact", "fast")]


def seconds(work: Workload, rates: Rates | None) -> list[str]:
    return [f"{step_seconds(work, rates):.3g}"] if rates else []


def notes(work: Workload, unit: str, rates: Rates | None) -> list[str]:
    """What the figures mean and what they rest on."""
    lines = [f"sent: {unit} that a worker sends per step under trainer.reduction=exact or fast"]
    if rates:
        known = [f"products at {rates.flops_per_s / 1e9:,.0f} GFLOP/s"]
        if rates.copied_bytes_per_s:
            known.append(f"memory at {rates.copied_bytes_per_s / 1e9:,.1f} GB/s")
        if rates.sent_bytes_per_s:
            known.append(f"messages at {rates.sent_bytes_per_s / 1e9:,.2f} GB/s")
        lines.append(f"step_s: seconds, {', '.join(known)}; nothing overlapped, nothing but these counted")
    if not work.on_cpu:
        lines.append(
            f"a GPU's memory: a sum of tensors and 1 GB of context, not measured; beside it worker 0 needs "
            f"{spelled(host_snapshots(work))} of the host's memory for snapshots, less where sharded"
        )
    return lines


def in_unit(size: float, unit: str) -> str:
    return f"{size / 1e9:,.2f}" if unit == "GB" else f"{size / 1e6:,.0f}"


def spelled(size: float) -> str:
    """In the unit that suits the size."""
    scale, unit = next(((scale, unit) for scale, unit in UNITS if size >= scale), UNITS[-1])
    return f"{size / scale:,.0f} {unit}" if size >= 100 * scale else f"{size / scale:.3g} {unit}"


def align(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
