"""The table of speeds in docs/RESULTS.md, made from benchmarks/results/: python benchmarks/table.py

For each program its newest folder there, <date>_<claim>/rows.jsonl. A test compares what this prints with
what docs/RESULTS.md holds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = ["| what | program | result |", "|---|---|---|"]


def rows(claim: str) -> list[dict[str, Any]]:
    """The rows of a program's newest results; none where it has not run."""
    found = sorted(RESULTS.glob(f"*_{claim}/rows.jsonl"))
    if not found:
        return []
    return [json.loads(line) for line in found[-1].read_text().splitlines() if line.startswith("{")]


def line(what: str, program: str, result: str) -> str:
    return f"| {what} | `benchmarks/{program}.py` | {result} |"


def with_range(entry: dict[str, Any], key: str, digits: int) -> str:
    """A value with the range of the rounds."""
    return f"{entry[key]:.{digits}f} ({entry['from']:.{digits}f} to {entry['to']:.{digits}f})"


def throughput() -> Iterator[str]:
    for entry in rows("throughput"):
        size, millions, workers = entry["size"], entry["parameters"] / 1e6, entry["workers"]
        step_ms, tokens, rate = 1e3 / entry["steps_per_s"], entry["tokens_per_s"], entry["product_rate"]
        parts = ", ".join(f"{part} {share:.1%}" for part, share in entry["shares"].items())
        products = f"products at {entry['products']:.0%} of the {rate} GFLOP/s measured for large ones"
        yield line(
            f"{size}: {millions:.2f} M parameters, {workers} workers",
            "throughput",
            f"{step_ms:.0f} ms a step, {tokens:,} tokens/s, {products}; {parts}",
        )


def against() -> Iterator[str]:
    for entry in [*rows("against_cpu"), *rows("against_10M")]:
        if "ratio" in entry:
            peer, ours, size = entry["peer"], entry["ours"], entry["size"]
            what = f"nanoGPT's time per step ({peer}) over ours ({ours}), its {size} size"
            yield line(what, "against", with_range(entry, "ratio", 2))


def scaling() -> Iterator[str]:
    for entry in rows("scaling"):
        if "efficiency" in entry and entry["workers"] == 2:
            what = f"two workers over twice one, {entry['size']}, {entry['reduction']}"
            yield line(what, "scaling", with_range(entry, "efficiency", 3))


def ratios() -> Iterator[str]:
    """Programs whose last row is one ratio."""
    over_import = "start of the process to the first step over a bare `import torch`"
    for claim, what in (("start", over_import), ("sampling", "writing with the cache over recomputing")):
        for entry in rows(claim)[-1:]:
            yield line(what, claim, with_range(entry, "ratio", 2))


def time_to_loss() -> Iterator[str]:
    for entry in rows("time_to_loss")[-1:]:
        reached, seeds, within_s = entry["reached"], entry["seeds"], entry["within_s"]
        worst, median_s = entry["loss_worst"], entry["seconds_median"]
        yield line(
            f"tiny Shakespeare to validation loss {entry['target']}",
            "time_to_loss",
            f"{reached} of {seeds} seeds within {within_s:g} s; worst loss {worst:.3f}, "
            f"{median_s:.1f} s from start to record",
        )


def main() -> int:
    lines = [*HEAD, *throughput(), *against(), *scaling(), *ratios(), *time_to_loss()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
