"""Say which run is best, and where and in what runs differ: python -m mingpt compare RUN RUN [RUN ...]

A RUN is a run folder, or the metrics.jsonl of a run. The snapshots of a run may also lie at the
run's snapshot.path. The command prints a row for each run, and draws the losses of all runs into one picture,
by default compare.png in the working directory. An earlier picture of this program is replaced, but no other
file. Then the command compares each run with the first run, and prints for each pair:

- which of the two has the lower validation loss at the last step that both have evaluated
- the settings, data and versions that differ, with * if they can change the result (with
  trainer.reduction=exact)
- for each metric that differs, the first values that differ
- how many tensors differ between the two runs' snapshots of the newest step at which both have a snapshot
- what is not compared
- the finding: "the same bits", or what is on record as different

Exit code 0: all that was compared has the same bits; 1: something differs, or a snapshot is damaged; 2: a
run is missing or cannot be read, or two runs have no step in common.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of
from mingpt.base.paths import typed_path
from mingpt.config import flatten, settings, to_dict
from mingpt.config.cli import build, read_file
from mingpt.report import load_history, read_records
from mingpt.report.plot import draw_curves, read_curves
from mingpt.snapshot import Snapshot, SnapshotStore
from mingpt.snapshot.lookup import possible_places
from mingpt.tools.pictures import write_picture

TIMINGS = ("_s", "mfu")  # endings of the names of metrics that measure time, which are not compared
HEADER = "  steps  val/loss  lowest  bits/byte  lowest  seconds         tokens  run"
ROW = "{:7}{:10.3f}{:8.3f}{:11.3f}{:8.3f}{:9.0f}{:15,}  "
Facts = Mapping[str, str]  # {name: value} of a run's settings, data, software and so on; {} if unknown


class Run(NamedTuple):
    """What a run's folder holds. `stores` has, for each step with a snapshot, the SnapshotStore to read."""

    name: str
    folder: Path
    file: Path  # metrics.jsonl
    records: Sequence[Mapping[str, Any]]
    history: Mapping[str, Any]
    stores: Mapping[int, SnapshotStore]


class Comparison(NamedTuple):
    """The lines to print on two runs. If `differences` is empty, what was compared has the same bits."""

    facts: Sequence[str]
    differences: Sequence[str]
    not_compared: Sequence[str]
    finding: str


def read_run(name: str) -> Run:
    """Return a run whose folder is on a disk of this machine. The run's snapshots are listed, not read.

    `name` is the path of a run folder or a metrics.jsonl. Raises UserError if there is no such path, or if
    the folder's config.yaml is damaged. Raises OSError if the records cannot be read, and UnreadableSnapshot
    if the snapshots cannot be listed.
    """
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name} is not there: give a run folder such as out/default, or a metrics.jsonl")
    folder, file = (path.parent, path) if path.is_file() else (path, path / "metrics.jsonl")
    places = map(SnapshotStore, possible_places(str(folder)))
    stores = {step: store for store in places for step in store.steps()}
    return Run(name, folder, file, list(read_records(file)), load_history(folder) or {}, stores)


def read_values(run: Run) -> dict[tuple[int, str], float]:
    """Return {(step, name of the metric): value} of a run.

    Integers, values that are not finite, and metrics that measure time are left out.
    """
    return {
        (record["step"], name): value
        for record in run.records
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value) and not name.endswith(TIMINGS)
    }


def read_facts(run: Run) -> dict[str, str]:
    """Return {name: value} of a run's settings, data, tokenizer, software and numbers of workers.

    The values are from config.yaml and run.json; the result is empty if either file is missing, or if
    run.json is damaged or has no `inputs`. If run.json records changes of a setting, the setting has its
    first value. Each change has a name of its own, such as "optimizer.learning_rate after step 100". Raises
    UserError if config.yaml cannot be used.
    """
    config, inputs = run.folder / "config.yaml", run.history.get("inputs")
    if not inputs or not config.is_file():
        return {}
    known = {key: value for key, value in read_file(str(config)).items() if key in settings()}
    found = flatten(to_dict(build(known))) | flatten(inputs)
    for change in reversed(run.history.get("changes", [])):
        for text in change["settings"]:
            key, values = text.split(": ", 1)
            new = found.get(key, values.rpartition(" -> ")[2])  # a value may be a path with an arrow
            old = values.removesuffix(f" -> {new}")
            found |= {key: old, f"{key} after step {change['step']}": new}
    workers = dict.fromkeys(str(entry.get("workers")) for entry in run.history.get("generations", []))
    found |= {"run_dir": "", "workers": ", then ".join(workers)}
    return {key: str(value) for key, value in found.items()}


def affects_result(key: str) -> bool:
    """Return whether the fact named `key` (see Facts) can change the result, or the losses on record.

    The answer is for trainer.reduction=exact.
    """
    if key in settings():
        return settings()[key].affects_result or key == "trainer.eval_windows"
    return key != "workers"


def explain(differing: Sequence[str], are_known: bool) -> str:
    """Return a finding on two runs that differ: what is on record as different, or that this is not known.

    `differing` has the names of the facts that differ; those that cannot change the result are named only if
    there are no others. `are_known` says whether the Facts of both runs are on record.
    """
    if not are_known:
        return "cannot tell: settings are not on record, give run folders"
    causes = [key for key in differing if affects_result(key)] or differing
    if not causes:
        return "cannot tell: nothing on record differs"
    return f"on record as different: {', '.join(causes)}"


def compare_tensors(runs: Sequence[Run], step: int) -> Iterator[str]:
    """Yield the name and the difference of each tensor that differs in the two runs' snapshots of `step`.

    Raises CorruptSnapshot, whose message names the run, if a snapshot is damaged. For further errors see
    `SnapshotStore.read`.
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
    """Compare the metrics of two runs, and their snapshots of the newest step at which both have a snapshot.

    A damaged snapshot counts as a difference. Raises UserError if the runs have no value and no snapshot of
    the same step, or if a config.yaml cannot be used. Raises UnreadableSnapshot if a snapshot cannot be
    read.
    """
    runs = (one, other)
    ours, theirs = map(read_values, runs)
    pairs = {key: (ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())}
    saved = max(one.stores.keys() & other.stores.keys(), default=None)
    if saved is None and not pairs:
        raise UserError(f"{one.name} and {other.name} have no record and no snapshot of the same step")
    # Later steps are put in first, so that the earliest step of each metric replaces them.
    first = {name: (step, (a, b)) for (step, name), (a, b) in reversed(pairs.items()) if a != b}
    differences = [
        f"{name} differs from step {step} on: {a:.8g} and {b:.8g}, "
        f"by {abs(a - b) / max(abs(a), abs(b)):.0e} of it"
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
        except UserError as error:  # a snapshot has a different schema
            not_compared.append(f"not compared: tensors of step {saved} ({error})")
    facts = [read_facts(run) for run in runs]
    known, others = facts if all(facts) else ({}, {})
    # A fact may be missing in a run of an older version, such as software.kernels.
    differing = [key for key in known | others if known.get(key, "none") != others.get(key, "none")]
    evaluations = [(step, a, b) for (step, name), (a, b) in pairs.items() if name == "val/loss"]
    lines = [
        f"val/loss at step {step}, the last of both runs: {a:.4f} and {b:.4f}, "
        f"lower in {one.name if a < b else other.name}"
        for step, a, b in evaluations[-1:]
        if a != b
    ]
    lines += [
        f"{'*' if affects_result(key) else ' '} {key}: {known.get(key)} -> {others.get(key)}"
        for key in differing
    ]
    finding = f"the same bits: {compared}"
    if differences:
        finding = explain(differing, all(facts))
    return Comparison(lines, differences, not_compared, finding)


def tabulate(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a header and a row for each run; "-" stands for a value that is not known."""
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
    """Draw the losses of all runs into a PNG at `path`; yield a line that names the PNG or an error."""
    try:
        curves = {run.name: read_curves(run.file) for run in runs}
        if not any(curve.size for found in curves.values() for curve in found):
            yield f"{path} is not drawn: no loss is on record"
            return
        write_picture(path, draw_curves, curves)
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
