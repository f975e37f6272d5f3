"""The README's table of speeds, made from benchmarks/results/: python benchmarks/table.py

For each program its newest folder there, <date>_<claim>/rows.jsonl. A test compares what this prints with what the README holds.
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def rows(claim: str) -> list[dict[str, Any]]:
    """The rows of a program's newest results; none where it has not run."""
    found = sorted(RESULTS.glob(f"*_{claim}/rows.jsonl"))
    return [json.loads(line) for line in found[-1].read_text().splitlines() if line.startswith("{")] if found else []


def lines() -> list[str]:
    written = ["| what | program | result |", "|---|---|---|"]
    for entry in rows("throughput"):
        parts = ", ".join(f"{part} {share:.1%}" for part, share in entry["shares"].items())
        written.append(
            f"| {entry['size']}: {entry['parameters'] / 1e6:.2f} M parameters, {entry['workers']} workers | `benchmarks/throughput.py` | "
            f"{1e3 / entry['steps_per_s']:.0f} ms a step, {entry['tokens_per_s']:,} tokens/s, products at {entry['products']:.0%} of the "
            f"{entry['product_rate']} GFLOP/s measured for large ones; {parts} |"
        )
    for claim in ("against_cpu", "against_10M"):
        for entry in rows(claim):
            if "ratio" in entry:
                written.append(
                    f"| nanoGPT's time per step ({entry['peer']}) over ours ({entry['ours']}), its {entry['size']} size | `benchmarks/against.py` | "
                    f"{entry['ratio']:.2f} ({entry['from']:.2f} to {entry['to']:.2f}) |"
                )
    for entry in rows("scaling"):
        if "efficiency" in entry and entry["workers"] == 2:
            written.append(
                f"| two workers over twice one, {entry['size']}, {entry['reduction']} | `benchmarks/scaling.py` | "
                f"{entry['efficiency']:.3f} ({entry['from']:.3f} to {entry['to']:.3f}) |"
            )
    for claim, what in (
        ("start", "start of the process to the first step over a bare `import torch`"),
        ("sampling", "writing with the cache over recomputing"),
    ):
        for entry in rows(claim)[-1:]:
            written.append(f"| {what} | `benchmarks/{claim}.py` | {entry['ratio']:.2f} ({entry['from']:.2f} to {entry['to']:.2f}) |")
    for entry in rows("time_to_loss")[-1:]:
        written.append(
            f"| tiny Shakespeare to validation loss {entry['target']} | `benchmarks/time_to_loss.py` | "
            f"{entry['reached']} of {entry['seeds']} seeds within {entry['within_s']:g} s; worst loss {entry['loss_worst']:.3f}, "
            f"{entry['seconds_median']:.1f} s from start to record |"
        )
    return written


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
