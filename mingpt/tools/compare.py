"""Say which run is best, and where and in what runs differ: python -m mingpt compare RUN RUN [RUN ...]

A RUN is a run folder, or the metrics.jsonl of a run. The snapshots of a run may also lie at the
run's snapshot.path. The command prints a row for each run, and draws the losses of all runs into one picture,
by default compare.png in the working directory. An earlier picture of this program is replaced, but no other
file. Then the command compares each run with the first run, and prints for each pair:

- which of the two has the lower validation loss at the last step that both have evaluated
- the settings, data and versions that differ, with * if they can change the result (with
  trainer.reduction=exact)
- for each metric that differs, the first values that differ
- which files differ between the two runs' snapshots of the newest step at which both have a snapshot
- what is not compared
- the finding: "the same bits", or what is on record as different

Exit code 0: all that was compared has the same bits; 1: something differs, or a snapshot is damaged; 2: a
run is missing or cannot be read, or two runs have no step in common.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of
from mingpt.base.paths import typed_path
from mingpt.config import flatten, settings
from mingpt.config.cli import read_file
from mingpt.report import load_history, read_records
from mingpt.report.plot import draw_curves, read_curves
from mingpt.snapshot import Store
from mingpt.snapshot.lookup import possible_places
from mingpt.tools.pictures import write_picture

TIMINGS = ("_s", "mfu")  # endings of the names of metrics that measure time, which are not compared
HEADER = "  steps  val/loss  lowest  bits/byte  lowest  seconds         tokens  run"
ROW = "{:7}{:10.3f}{:8.3f}{:11.3f}{:8.3f}{:9.0f}{:15,}  "


class Run(NamedTuple):
    """What a run's folder holds. `stores` has, for each step with a snapshot, the Store to read."""

    name: str
    folder: Path
    file: Path  # metrics.jsonl
    records: Sequence[Mapping[str, Any]]
    history: Mapping[str, Any]
    stores: Mapping[int, Store]


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
    places = map(Store, possible_places(str(folder)))
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
    run.json is damaged or has no `inputs`. "changes" are those of settings during the run. Settings that are
    not known are left out. Raises UserError if config.yaml cannot be read.
    """
    config, inputs = run.folder / "config.yaml", run.history.get("inputs")
    if not inputs or not config.is_file():
        return {}
    found = {key: value for key, value in read_file(str(config)).items() if key in settings()}
    changes = [
        f"{'; '.join(change['settings'])} after step {change['step']}"
        for change in run.history.get("changes", [])
    ]
    workers = dict.fromkeys(str(entry.get("workers")) for entry in run.history.get("generations", []))
    found |= {"run_dir": "", "changes": ", ".join(changes), "workers": ", then ".join(workers)}
    return {key: str(value) for key, value in (found | flatten(inputs)).items()}


def affects_result(key: str) -> bool:
    """Return whether the fact named `key` can change the result, with trainer.reduction=exact."""
    return settings()[key].affects_result if key in settings() else key != "workers"


def compare_facts(one: Run, other: Run) -> tuple[list[str], str]:
    """Return (a line for each fact that differs, what is on record as different).

    Facts that cannot change the result are only on record as different if there are no others.
    """
    known, others = read_facts(one), read_facts(other)
    if not known or not others:
        return [], "cannot tell: settings are not on record, give run folders"
    # A fact may be missing in a run of an older version, such as software.kernels.
    differing = [key for key in known if key in others and known[key] != others[key]]
    causes = [key for key in differing if affects_result(key)]
    lines = [f"{'*' if key in causes else ' '} {key}: {known[key]} -> {others[key]}" for key in differing]
    if not differing:
        return [], "cannot tell: nothing on record differs"
    return lines, f"on record as different: {', '.join(causes or differing)}"


def compare_snapshots(one: Run, other: Run, step: int) -> list[str]:
    """Return a line for each file that differs in the snapshots of `step`, or for a damaged snapshot.

    Equal tensors make equal files. For further errors see `Store.read`.
    """
    files = []
    for run in (one, other):
        try:
            records = run.stores[step].read(step).manifest.files
        except CorruptSnapshot as error:
            return [f"the snapshot of step {step} of {run.name} is damaged: {error}"]
        files.append({record.name: record.sha256 for record in records})
    ours, theirs = files
    return [f"{name} differs" for name in ours | theirs if ours.get(name) != theirs.get(name)]


def compare(one: Run, other: Run) -> Comparison:
    """Compare the metrics of two runs, and their snapshots of the newest step at which both have a snapshot.

    A damaged snapshot counts as a difference. Raises UserError if the runs have no value and no snapshot of
    the same step, if a config.yaml cannot be used, or if another version of this program wrote a snapshot.
    Raises UnreadableSnapshot if a snapshot cannot be read.
    """
    ours, theirs = read_values(one), read_values(other)
    pairs = {key: (ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())}
    saved = max(one.stores.keys() & other.stores.keys(), default=None)
    if saved is None and not pairs:
        raise UserError(f"{one.name} and {other.name} have no record and no snapshot of the same step")
    first, best = dict[str, str](), ""
    for (step, name), (a, b) in pairs.items():
        if a != b:
            first.setdefault(name, f"{name} differs from step {step} on: {a:.8g} and {b:.8g}")
        if name == "val/loss":
            lower = one.name if a < b else other.name
            said = f"val/loss at step {step}, the last of both runs: {a:.4f} and {b:.4f}, lower in {lower}"
            best = "" if a == b else said
    facts, finding = compare_facts(one, other)
    differences, not_compared = list(first.values()), list[str]()
    same, alone = f"the same bits: {len(pairs)} values", len(ours.keys() ^ theirs.keys())
    if alone:
        not_compared.append(f"not compared: {alone} values, in one run only")
    if saved is None:
        not_compared.append("not compared: tensors, as no step has a snapshot of both runs")
    else:
        same += f", tensors of step {saved}"
        differences += compare_snapshots(one, other, saved)
    return Comparison([best, *facts], differences, not_compared, finding if differences else same)


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
        lines += [*found.facts, *found.differences, *found.not_compared, found.finding]
    write_lines(lines)
    return int(any(found.differences for found in comparisons))
