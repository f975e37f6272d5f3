"""A row per worker."""

import hashlib
import json
from collections.abc import Sequence

from mingpt.doctor.facts import Facts
from mingpt.doctor.verdict import STATES_IN_MEMORY, size

NOTHING = "-"


def make_table(workers: Sequence[Facts]) -> list[str]:
    """Lines of text. What is found once per node stands in the row of its first worker."""
    rows = [["worker", "host", "device", "torch", "clock", "data", "config", "snapshots", "shared",
             "all-reduce", "memory for snapshots"]]  # fmt: skip
    rows += [make_row(worker, workers) for worker in workers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def make_row(worker: Facts, workers: Sequence[Facts]) -> list[str]:
    return [
        str(worker.rank),
        f"{worker.host} {worker.address or ''}".strip(),
        worker.device or NOTHING,
        worker.torch or NOTHING,
        NOTHING if worker.clock_s is None else f"{worker.clock_s:+.3f} s",
        worker.data[:8] if worker.data else NOTHING,
        config_digest(worker),
        describe_folders(worker),
        describe_sharing(worker, workers),
        f"{worker.all_reduce_mb_s:.0f} MB/s" if worker.all_reduce_mb_s else NOTHING,
        describe_memory(worker),
    ]


def config_digest(worker: Facts) -> str:
    if not worker.config:
        return NOTHING
    return hashlib.sha256(json.dumps(worker.config, sort_keys=True).encode()).hexdigest()[:8]


def describe_folders(worker: Facts) -> str:
    if not worker.folders:
        return NOTHING
    errors = [error for error in worker.folders.values() if error]
    return errors[0][:40] if errors else "written, read"


def describe_sharing(worker: Facts, workers: Sequence[Facts]) -> str:
    """With how many of the other nodes it shares the folder of its snapshots."""
    others = {one.probe for one in workers if one.probe and one.probe != worker.probe}
    if not worker.probe or not others:
        return NOTHING
    seen = others & set(worker.sees)
    if seen == others:
        return "by all"
    return f"with {len(seen)} of {len(others)}" if seen else "own"


def describe_memory(worker: Facts) -> str:
    if worker.memory_free is None or worker.state_bytes is None:
        return NOTHING
    return f"{size(worker.memory_free)} free, {size(STATES_IN_MEMORY * worker.state_bytes)} needed"
