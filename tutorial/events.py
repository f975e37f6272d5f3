"""Record when this process computes, sends or waits; `tutorial.timeline` draws what is recorded.

A file has a title and events: rank, what, name, begin and end in ms, by the clock that all ranks share.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

EVENTS: list[dict[str, Any]] = []  # of this process, in seconds


@contextmanager
def record(what: str, name: str = "") -> Iterator[None]:
    begin = time.monotonic()
    yield
    add(what, name, begin, time.monotonic())


def add(what: str, name: str, begin: float, end: float) -> None:
    """Add what has no block of its own, such as a send that goes on while the process computes."""
    EVENTS.append({"what": what, "name": name, "begin": begin, "end": end})


def save(path: str, title: str) -> None:
    """Write the events of all ranks into one file. A collective: all ranks call it."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [{"rank": dist.get_rank(), **event} for event in EVENTS])
    rows = [row for rows in by_rank for row in rows]
    start = min(row["begin"] for row in rows)
    rows = [row | {key: round(1000 * (row[key] - start), 2) for key in ("begin", "end")} for row in rows]
    if dist.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: float(row["begin"])))
        Path(path).write_text(f'{{"title": {json.dumps(title)}, "events": [\n{text}\n]}}\n')
