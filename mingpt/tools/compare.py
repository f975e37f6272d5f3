"""Say which run is best, where runs begin to differ, and why: python -m mingpt compare RUN RUN [RUN ...]

A RUN is a run folder, or a metrics.jsonl that was copied from one. The snapshots of a run may also lie at its
snapshot.path. Prints a row for each run, and draws the losses of all runs into one picture, compare.png in
the working directory, which is replaced if it is there. Compares each run with the first, and prints which
one has the lower validation loss at the last step that both have evaluated; the settings, data and versions
that differ, with * if they can change the result; the first value of each metric that differs; the tensors
that differ in the newest snapshots of the same step; what is not compared; and, last, the finding. Exit code
0: what was compared has the same bits; 1: it differs; 2: a run is missing or cannot be read, or two runs have
nothing in common.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of, write_atomic
from mingpt.base.paths import typed_path
from mingpt.config import flatten, settings, to_dict
from mingpt.config.cli import build, read_file
from mingpt.report import load_history, read_records
from mingpt.report.plot import draw_curves, read_curves, to_png
from mingpt.snapshot import Snapshot, SnapshotStore
from mingpt.snapshot.lookup import possible_places

TIMINGS = ("_s", "mfu")  # ends of names
# Facts that only change the rounding; the parallelism does so only under trainer.reduction=fast.
NUMERICS = (
    "trainer.dtype",
    "trainer.compile",
    "trainer.reduction",
    "trainer.fsdp_param_dtype",
    "trainer.micro_batch_size",
    "software.",
)
PARALLELISM = ("workers", "trainer.parallel", "trainer.shard_optimizer")
# With dropout, these also change which activations are dropped.
MASKS = ("trainer.micro_batch_size", "trainer.compile", "software.compiled", "software.device_type")
# The stages of a step, in which values arise; the one of step 0 is an evaluation.
FORWARD, BACKWARD, UPDATE, EVALUATION = range(4)
STAGES = {"train/loss": FORWARD, "grad_norm": BACKWARD, "lr": UPDATE}
# The stage of step 1 in which facts begin to act, by their first letters; all others act from step 0 on.
BEGIN = {
    "model.dropout": FORWARD,
    "trainer.batch_size": FORWARD,
    "trainer.reduction": BACKWARD,
    "optimizer.": UPDATE,
}
AFTER_WARMUP = ("trainer.max_steps", "optimizer.schedule", "optimizer.min_lr_fraction")
ROUNDING, OTHER = "rounding", "another computation"
# Gradient norms in float32 differ by rounding if they differ by less than the first share of them for each
# step since they were last seen equal; by more than the second one they do not, in bfloat16 either.
ROUNDING_SHARE, OTHER_SHARE = 1e-4, 1e-2
MAX_UNSEEN = 20  # steps without a record, after which rounding may have grown to any size
HEADER = "  steps  val/loss  lowest  bits/byte  lowest  seconds         tokens  run"
ROW = "{:7}{:10.3f}{:8.3f}{:11.3f}{:8.3f}{:9.0f}{:15,}  "
Facts = Mapping[str, str]  # settings, data, tokenizer, software and workers of a run; empty if unknown
Pair = tuple[float, float]


class Run(NamedTuple):
    """What a run's folder holds; `stores` has the places of its snapshots, by step."""

    name: str
    folder: Path
    file: Path  # metrics.jsonl
    records: Sequence[Mapping[str, Any]]
    history: Mapping[str, Any]
    stores: Mapping[int, SnapshotStore]


class Comparison(NamedTuple):
    """The lines on two runs. If `differences` is empty, what was compared has the same bits."""

    facts: Sequence[str]
    differences: Sequence[str]
    not_compared: Sequence[str]
    finding: str


def read_run(name: str) -> Run:
    """Read what there is of a local run, without its snapshots.

    Raises UserError if the run is missing, OSError if it cannot be read.
    """
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name} is not there: give a run folder such as out/default, or a metrics.jsonl")
    folder, file = (path.parent, path) if path.is_file() else (path, path / "metrics.jsonl")
    places = map(SnapshotStore, possible_places(str(folder)))
    stores = {step: store for store in places for step in store.steps()}
    return Run(name, folder, file, list(read_records(file)), load_history(folder) or {}, stores)


def read_values(run: Run) -> dict[tuple[int, str], float]:
    """Return {(step, metric): value} without integers and timings."""
    return {
        (record["step"], name): value
        for record in run.records
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value) and not name.endswith(TIMINGS)
    }


def read_facts(run: Run) -> dict[str, str]:
    """Return the facts that config.yaml and run.json tell; none without both.

    Settings are those of the run's start; a later change of one is a fact of its own.
    """
    config, inputs = run.folder / "config.yaml", run.history.get("inputs")
    if not inputs or not config.is_file():
        return {}
    known = {key: value for key, value in read_file(str(config)).items() if key in settings()}
    found = flatten(to_dict(build(known))) | flatten(inputs)
    for change in reversed(run.history.get("changes", [])):
        for text in change["settings"]:
            key, values = text.split(": ", 1)
            old, new = values.split(" -> ", 1)
            found |= {key: old, f"{key} after step {change['step']}": new}
    workers = dict.fromkeys(str(entry.get("workers")) for entry in run.history.get("generations", []))
    found |= {"run_dir": "", "workers": ", then ".join(workers)}
    return {key: str(value) for key, value in found.items()}


def affects_result(key: str) -> bool:
    """Whether this fact can change the result, or the losses that are recorded."""
    if key in settings():
        return settings()[key].affects_result or key == "trainer.eval_windows"
    return key != "workers"


def can_act(key: str, facts: Sequence[Facts], moment: tuple[int, int]) -> bool:
    """Whether a fact that differs can have acted at this step and stage, or before."""
    if key == "trainer.eval_windows":
        return moment[1] == EVALUATION
    if key == "trainer.on_nonfinite":
        return False  # where it acts, the run that stops has no record
    if " after step " in key:
        return int(key.rpartition(" ")[2]) < moment[0]
    if key in AFTER_WARMUP:
        return (min(int(known["optimizer.warmup_steps"]) for known in facts) + 1, UPDATE) <= moment
    stages = [stage for prefix, stage in BEGIN.items() if key.startswith(prefix)]
    return (1, stages[0]) <= moment if stages else True


def share(pair: Pair) -> float:
    """Return the difference of two values as a share of the larger one."""
    return abs(pair[0] - pair[1]) / max(map(abs, pair))


def classify(step: int, pair: Pair, steps: Sequence[int]) -> str:
    """Tell rounding from another computation by the first gradient norms that differ.

    `steps` are those with gradient norms of both runs. Rounding begins in the last digits and grows from step
    to step; other samples or dropout masks change the norm at once.
    """
    unseen = step - max((equal for equal in steps if equal < step), default=0)
    if unseen <= MAX_UNSEEN:
        if share(pair) < ROUNDING_SHARE * unseen:
            return ROUNDING
        if share(pair) > OTHER_SHARE:
            return OTHER
    return f"{ROUNDING} or {OTHER}"


def explain(able: Sequence[str], facts: Sequence[Facts], kind: str) -> str:
    """Return in words why two runs differ.

    `able` has the facts that differ and can have acted; `kind` is what `classify` says.
    """
    is_fast = "fast" in [known.get("trainer.reduction") for known in facts]
    has_dropout = any(float(known.get("model.dropout", 0)) for known in facts)
    prefixes = NUMERICS + PARALLELISM if is_fast else NUMERICS
    rounding = [key for key in able if key.startswith(prefixes) and not (has_dropout and key in MASKS)]
    causes = [key for key in able if affects_result(key) and key not in rounding]
    if causes:
        return f"{OTHER}: {', '.join(causes)}"
    if not all(facts):
        return f"{kind}: settings are not on record: give run folders"
    if rounding and kind != OTHER:
        return f"{ROUNDING}: {', '.join(rounding)}"
    return f"{kind}: nothing on record explains it"


def compare_tensors(runs: Sequence[Run], step: int) -> Iterator[str]:
    """Yield the name of each tensor that differs in the runs' snapshots of a step, and how.

    Raises CorruptSnapshot, which names the run, if one of them has other bytes than were written.
    """
    opened = list[Snapshot]()
    for run in runs:
        try:
            opened.append(run.stores[step].read(step))
        except CorruptSnapshot as error:
            raise CorruptSnapshot(f"the snapshot of step {step} of {run.name} is damaged: {error}") from None
    one, other = opened
    for name in one.file_of | other.file_of:
        ours, theirs = (run.read(name) if name in run.file_of else None for run in opened)
        if ours is None or theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"{name}, in one run only or of another shape or type"
        elif not torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            yield f"{name}, by {float((ours.double() - theirs.double()).abs().max()):.3g} at most"


def compare(one: Run, other: Run) -> Comparison:
    """Compare two runs.

    Raises UserError if they have nothing in common, UnreadableSnapshot if a snapshot cannot be read.
    """
    runs = (one, other)
    ours, theirs = map(read_values, runs)
    pairs = {key: (ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())}
    saved = max(one.stores.keys() & other.stores.keys(), default=None)
    if saved is None and not pairs:
        raise UserError(f"{one.name} and {other.name} have no record and no snapshot of the same step")
    # Of several steps, the earliest is the last one put in.
    first = {name: (step, (a, b)) for (step, name), (a, b) in reversed(pairs.items()) if a != b}
    differences = [
        f"{name} differs from step {step} on: {a:.8g} and {b:.8g}, by {share((a, b)):.0e} of it"
        for name, (step, (a, b)) in sorted(first.items(), key=lambda item: item[1])
    ]
    compared, not_compared = f"{len(pairs)} values", list[str]()
    only = sorted(ours.keys() ^ theirs.keys())
    if only:
        not_compared.append(
            f"not compared: {len(only)} values of steps {only[0][0]} to {only[-1][0]}, in one run only"
        )
    if saved is None:
        not_compared.append("not compared: tensors, as no step has a snapshot of both runs")
    else:
        compared += f", tensors of step {saved}"
        try:
            tensors = list(compare_tensors(runs, saved))
            if tensors:
                differences.append(f"tensors that differ at step {saved}: {len(tensors)}, first {tensors[0]}")
        except CorruptSnapshot as error:
            return Comparison([], [*differences, str(error)], not_compared, finding=str(error))
        except UserError as error:  # of another schema
            not_compared.append(f"not compared: tensors of step {saved} ({error})")
    facts = [read_facts(run) for run in runs]
    known, others = facts if all(facts) else ({}, {})
    differing = [key for key in known | others if known.get(key) != others.get(key)]
    verdict = [
        f"val/loss at step {step}, the last of both runs: {a:.4f} and {b:.4f}, "
        f"lower in {one.name if a < b else other.name}"
        for (step, name), (a, b) in pairs.items()
        if name == "val/loss" and a != b
    ]
    lines = verdict[-1:] + [
        f"{'*' if affects_result(key) else ' '} {key}: {known.get(key)} -> {others.get(key)}"
        for key in differing
    ]
    finding = f"the same bits: {compared}"
    if differences:
        moments = [(step, STAGES.get(name, EVALUATION)) for name, (step, _) in first.items()]
        moment = min(moments, default=(saved or 0, EVALUATION))
        able = [key for key in differing if can_act(key, facts, moment)]
        steps = [step for step, name in pairs if name == "grad_norm"]
        kind = OTHER if "lr" in first else classify(*first.get("grad_norm", (0, (1.0, 1.0))), steps)
        finding = explain(able, facts, kind)
    return Comparison(lines, differences, not_compared, finding)


def tabulate(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a header and a row for each run, with "-" for what is not known."""
    yield HEADER
    for run in runs:
        steps, losses, bits, tokens = (
            [record[name] for record in run.records if isinstance(record.get(name), (int, float))]
            or [math.nan]
            for name in ("step", "val/loss", "val/bits_per_byte", "tokens")
        )
        seconds = sum(entry.get("seconds", 0.0) for entry in run.history.get("generations", []))
        row = (max(steps), losses[-1], min(losses), bits[-1], min(bits), seconds or math.nan, tokens[-1])
        yield ROW.format(*row).replace("nan", "  -") + run.name  # NaN stands for what is not known


def draw(runs: Sequence[Run], path: str) -> Iterator[str]:
    """Draw the losses of all runs into a PNG and yield a line that names it, or says why there is none."""
    try:
        curves = {run.name: read_curves(run.file) for run in runs}
        write_atomic(path, to_png("compare.png", draw_curves, curves))
        yield f"losses of all runs: {path}"
    except (OSError, ImportError) as error:
        yield f"{path} is not drawn ({reason_of(error)}): give another --plot FILE"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt compare", __doc__)
    parser.add_argument(
        "first", type=typed_path, metavar="RUN", help="the run that the others are compared with"
    )
    parser.add_argument("others", nargs="+", type=typed_path, metavar="RUN", help="another run")
    parser.add_argument(
        "--plot",
        type=typed_path,
        default="compare.png",
        metavar="FILE",
        help="the picture (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(name) for name in (options.first, *options.others)]
        comparisons = [compare(runs[0], run) for run in runs[1:]]
    except (UnreadableSnapshot, OSError) as error:
        raise UserError(f"the runs cannot be compared: {reason_of(error)}") from None
    lines = [*tabulate(runs), *draw(runs, options.plot)]
    for run, found in zip(runs[1:], comparisons, strict=True):
        lines += ["", f"{runs[0].name} and {run.name}:"]
        for line in (*found.facts, *found.differences, *found.not_compared):
            lines += textwrap.wrap(line, 80, subsequent_indent="    ", break_on_hyphens=False)
        lines.append(found.finding)
    write_lines(lines)
    return int(any(found.differences for found in comparisons))
