"""The tables of docs/scale.md: what was counted at 2 to 32 workers, and what formulas say of up to 1,024.

    python benchmarks/scale.py

The counts are those of benchmarks/traffic.py in benchmarks/results/; nothing is measured here. A test
compares what this prints with the page.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from mingpt.config.cli import parse
from mingpt.launch.elastic.decisions import RUNNING, Entry
from mingpt.optim.muon import assign_batches
from mingpt.optim.optimizer import uses_muon
from mingpt.parallel.ddp import make_buckets
from mingpt.snapshot import TensorSpec, make_layout
from mingpt.tools.jobs import ROOT
from mingpt.tools.plan import Workload, bytes_sent

RESULTS = Path(__file__).parent / "results" / "2026-11-22_traffic" / "rows.jsonl"
VOCABULARY = 50257
MODELS = {
    "0.12 B": [],
    "1.6 B": ["model.n_layer=48", "model.n_embd=1600", "model.n_head=25"],
    "6.7 B": ["model.n_layer=32", "model.n_embd=4096", "model.n_head=32"],
}
WORKERS = (8, 64, 256, 1024)
STRATEGIES = {
    "ddp": ["trainer.parallel=ddp"],
    "fsdp": ["trainer.parallel=fsdp"],
    "fsdp, reshard=false": ["trainer.parallel=fsdp", "trainer.fsdp_reshard=false"],
    "fsdp, bfloat16": ["trainer.parallel=fsdp", "trainer.fsdp_param_dtype=bfloat16"],
}
DIGEST_BYTES, NORM_BYTES = 32, 4


def plan(model: str, workers: int, *settings: str, rounds: int = 1) -> Workload:
    """A job in which each worker computes so many micro-batches of one window a step."""
    batch = [f"trainer.batch_size={workers * rounds}", "trainer.micro_batch_size=1"]
    config = parse([str(ROOT / "configs/gpt2.yaml"), *MODELS[model], *batch, *settings])
    return Workload(config, VOCABULARY, workers, on_cpu=False, dtype="bfloat16")


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"{title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
    yield ""


def counted() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [row for row in rows if "strategy" in row]


def counted_steps() -> Iterator[str]:
    """A row per strategy and optimizer, a column per number of workers."""
    rows = counted()
    counts = sorted({row["workers"] for row in rows})
    found = {(row["strategy"], row["optimizer"], row["workers"]): row for row in rows}
    kinds = list(dict.fromkeys((row["strategy"], row["optimizer"]) for row in rows))
    lines, over = [], []
    for strategy, optimizer in sorted(kinds):
        label = f"{strategy}, {optimizer}"
        cells = [found.get((strategy, optimizer, count)) for count in counts]
        lines.append([label, *("" if row is None else spell_step(row) for row in cells)])
        over.append(
            [label, *("" if row is None else f"{row['step']['largest'] / row['asked']:.3f}" for row in cells)]
        )
    head = ["strategy", *(f"{count} workers" for count in counts)]
    yield from table("Sent by a worker in a step, over a ring's all-reduce; collectives.", head, lines)
    yield from table(
        "Sent by the worker that sends most, over what `python -m mingpt plan` computes.", head, over
    )
    wires = [row["step"]["wire"] / row["step"]["sent"] for row in rows]
    yield f"On the wire over sent, in all of these: {min(wires):.2f} to {max(wires):.2f}.\n"


def spell_step(row: dict[str, Any]) -> str:
    return f"{row['step']['sent'] / row['ring']:.2f} x; {sum(row['step']['calls'].values())}"


def counted_rest() -> Iterator[str]:
    """Start, evaluation and snapshot under adamw."""
    rows = [row for row in counted() if row["optimizer"] == "adamw" and "fast" not in row["strategy"]]
    lines = []
    for row in sorted(rows, key=lambda row: (row["strategy"], row["workers"])):
        start, saved = row["start"], row["snapshot"]
        workers = row["workers"]
        lines.append(
            [
                row["strategy"], workers, start["keys"], f"{start['store'] / 1e3:.1f}",
                sum(start["calls"].values()), f"{start['sent'] * workers / (workers - 1) / 1e6:.2f}",
                start["peers"], f"{row['evaluation']['sent'] / 1e6:.3f}",
                sum(saved["calls"].values()), f"{saved['sent'] / 1e6:.3f}",
            ]
        )  # fmt: skip
    head = [
        "strategy", "workers", "keys in the store", "KB between a worker and the store",
        "collectives of a start", "MB that a start hands to each worker", "connections to other workers",
        "MB sent in an evaluation", "collectives of a snapshot", "MB sent for a snapshot",
    ]  # fmt: skip
    yield from table("Start, evaluation and snapshot, adamw.", head, lines)


def sent_by_formula() -> Iterator[str]:
    lines = []
    for model in MODELS:
        for strategy, settings in STRATEGIES.items():
            jobs = [plan(model, workers, *settings) for workers in WORKERS]
            lines.append([model, strategy, *(f"{bytes_sent(job) / 1e9:.2f}" for job in jobs)])
    head = ["parameters", "strategy", *(f"{count:,} workers" for count in WORKERS)]
    yield from table("GB that a worker sends per round (fsdp) or step (ddp).", head, lines)


def collectives(work: Workload) -> int:
    """Of a step with adamw, without the few small ones."""
    if work.config.trainer.parallel == "fsdp":
        layers = work.config.model.n_layer
        gathers = layers + 1 + (layers if work.config.trainer.fsdp_reshard else 0)
        return work.rounds * (gathers + layers + 1)
    return 2 * len(make_buckets([torch.empty(shape, device="meta") for shape in work.shapes.values()]))


def messages_by_formula() -> Iterator[str]:
    lines = []
    for model in MODELS:
        for name in ("ddp", "fsdp"):
            for workers in (WORKERS[0], WORKERS[-1]):
                work = plan(model, workers, *STRATEGIES[name])
                count = collectives(work)
                unit = 4 * (work.block_parameters if name == "fsdp" else work.parameters / count * 2)
                lines.append(
                    [model, name, f"{workers:,}", count, f"{count * (workers - 1):,}",
                     f"{unit / workers / 1e3:,.0f}"]
                )  # fmt: skip
    head = [
        "parameters", "strategy", "workers", "collectives", "messages of a worker",
        "KB of a message (a block's, a mean bucket's)",
    ]  # fmt: skip
    yield from table("Collectives and messages of a step of one round.", head, lines)


def state_by_formula() -> Iterator[str]:
    lines = []
    for model in MODELS:
        work = plan(model, 1)
        names = {f"model.{name}": shape for name, shape in work.shapes.items()}
        names |= {
            f"optimizer.{name}.{key}": shape
            for name, shape in work.shapes.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
        specs = {name: TensorSpec(torch.float32, shape) for name, shape in names.items()}
        files = make_layout(specs, step=1)
        rows = sum(shape[0] for shape in work.shapes.values())
        uneven = [plan(model, count).first_share * count for count in WORKERS]
        lines.append(
            [
                model, f"{work.state_bytes / 1e9:.1f}", len(files),
                f"{max(file.size for file in files) / 1e9:.2f}", f"{NORM_BYTES * rows / 1e6:.2f}",
                f"{4 * (work.parameters - work.root_parameters) / 1e9:.2f}",
                *(f"{share:.2f}" for share in uneven),
            ]
        )  # fmt: skip
    head = [
        "parameters", "state, GB", "files of a snapshot", "the largest, GB", "norms of rows, MB",
        "gathered for a forward pass, GB", *(f"largest share at {count:,}" for count in WORKERS),
    ]  # fmt: skip
    yield from table("State, files, and the largest worker's share over an even one.", head, lines)


def muon_by_formula() -> Iterator[str]:
    lines = []
    for model in MODELS:
        work = plan(model, 1, "optimizer.name=muon")
        shapes = {
            name: shape
            for name, shape in work.shapes.items()
            if uses_muon(name, shape, work.config.optimizer)
        }
        for device in ("cpu", "cuda"):
            dealt = assign_batches(shapes, WORKERS[-1], device)
            lines.append([model, device, len(shapes), sum(map(bool, dealt))])
    head = ["parameters", "device", "matrices", "workers that have a batch, of 1,024"]
    yield from table("Newton-Schulz iterations that Muon can deal.", head, lines)


def agents_by_formula() -> Iterator[str]:
    lines = []
    for nodes in (2, 16, 128):
        ids = tuple(f"{number:012x}" for number in range(nodes))
        entry = Entry(
            id=ids[0], host="node-0000", address="10.0.0.1", port=29400, nproc=8, counter=10**5,
            state=RUNNING, reach=ids, members=ids, round=ids[0], number=1, job=ids[0],
        )  # fmt: skip
        size = len(json.dumps(asdict(entry)))
        polls = 1 / max(0.5, min(1.0, 0.01 * nodes))
        lines.append([nodes, f"{size / 1e3:.1f}", f"{nodes * size * polls / 1e3:,.0f}", 2 * (nodes - 1)])
    head = ["nodes", "KB of an entry", "KB/s that an agent reads of a board", "pings of an agent per second"]
    yield from table("Agents of `launch/elastic.sh` while a job runs.", head, lines)


def small_by_formula() -> Iterator[str]:
    lines = []
    for count in WORKERS:
        status = 8 * (count + 5)
        lines.append(
            [f"{count:,}", status, 2 * (count - 1), f"{DIGEST_BYTES * count * 20 / 1e3:.0f}",
             f"{3 * (count - 1):,}", math.ceil(math.log2(count))]
        )  # fmt: skip
    head = [
        "workers, one micro-batch each", "bytes of a step's status", "hops of its ring",
        "KB of the audit in 20 steps", "connections under fsdp", "hops of a broadcast",
    ]  # fmt: skip
    yield from table("What is small.", head, lines)


def main() -> int:
    parts = [
        counted_steps, counted_rest, sent_by_formula, messages_by_formula, state_by_formula, small_by_formula,
        muon_by_formula, agents_by_formula,
    ]  # fmt: skip
    number = 0
    for line in (line for part in parts for line in part()):
        if line.endswith(".\n") and not line.startswith("On the wire"):
            number += 1
            line = f"**Table {number}.** {line}"
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
