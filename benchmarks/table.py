"""The tables that pages show, made from benchmarks/results/ and from configurations; nothing is measured.

    python benchmarks/table.py              # of speeds, in docs/RESULTS.md
    python benchmarks/table.py presets      # of configs/README.md

The speeds are from each program's newest folder, <date>_<claim>/rows.jsonl. A test compares the output with
the pages. Takes seconds, anywhere.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import argument_parser

from mingpt.tools.jobs import ROOT

RESULTS = Path(__file__).parent / "results"
SHAKESPEARE_CHARACTERS = 65
SPEEDS = ["| what | program | result |", "|---|---|---|"]
PRESETS = [
    "| preset | parameters | tokens per step | steps | tokens | FLOP | weights and optimizer |",
    "|---|---|---|---|---|---|---|",
]


def rows(claim: str) -> list[dict[str, Any]]:
    """The rows of a claim's newest results; none if the claim was not measured."""
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
            yield line(what, "steps_against", with_range(entry, "ratio", 2))


def scaling() -> Iterator[str]:
    for entry in rows("scaling"):
        if "efficiency" in entry and entry["workers"] == 2:
            what = f"two workers over twice one, {entry['size']}, {entry['reduction']}"
            yield line(what, "steps_against", with_range(entry, "efficiency", 3))


def ratios() -> Iterator[str]:
    """Rows of programs whose last row is one ratio."""
    for entry in rows("start")[-1:]:
        what = "start of the process to the first step over a bare `import torch`"
        yield line(what, "start", with_range(entry, "ratio", 2))


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


def preset(path: Path) -> str:
    """A row of a preset: FLOP of forward and backward passes (Chowdhery et al. 2022), state in float32."""
    import torch

    from mingpt.config.cli import parse
    from mingpt.model import GPT, parameter_shapes
    from mingpt.optim import state_shapes

    config = parse([str(path)])
    vocab_size = config.data.vocab_size or SHAKESPEARE_CHARACTERS
    block_size, trainer = config.data.block_size, config.trainer
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=vocab_size, block_size=block_size)
    parameters = sum(weight.numel() for weight in model.parameters())
    shapes = parameter_shapes(config.model, vocab_size=vocab_size, block_size=block_size)
    states = state_shapes(shapes, config.optimizer)
    state_bytes = 4 * sum(torch.Size(shape).numel() for shape in (*shapes.values(), *states.values()))
    per_step = trainer.batch_size * block_size
    tokens = per_step * trainer.max_steps
    return (
        f"| `{path.name}` | {parameters / 1e6:.1f} M | {per_step:,} | {trainer.max_steps:,} | "
        f"{tokens / 1e9:.2f} G | {model.flops_per_token() * tokens:.1e} | {state_bytes / 1e9:.2f} GB |"
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("table", nargs="?", choices=["speeds", "presets"], default="speeds")
    if parser.parse_args().table == "presets":
        lines = [*PRESETS, *map(preset, sorted((ROOT / "configs").glob("*.yaml")))]
    else:
        lines = [*SPEEDS, *throughput(), *against(), *scaling(), *ratios(), *time_to_loss()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
