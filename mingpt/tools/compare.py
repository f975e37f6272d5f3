"""Say which run is best, and where and in what runs differ: python -m mingpt compare RUN RUN [RUN ...]

A RUN is a run folder, or the metrics.jsonl of a run. The snapshots of a run may also lie at the
run's snapshot.path. The command prints a row for each run, and draws the losses of all runs into one picture,
by default compare.png in the working directory. An earlier picture of this program is replaced, but no other
file. Runs are a group if no setting, data or version on record that can change the result differs, except the
seed. A is the group of the first run, then come B, C and so on. A second run with the same seed belongs to
another group. Each run of another group is compared with the run of A that has the same seed, or else with
the first run. If all runs are of one group, or the settings of a run are not on record, each run is compared
with the first one. For each such pair the command prints:

- which of the two has the lower validation loss at the last step that both have evaluated
- the settings, data and versions that differ, with * if they can change the result (with
  trainer.reduction=exact)
- for each metric that differs, the first values that differ
- which files differ between the two runs' snapshots of the newest step at which both have a snapshot
- what is not compared
- the finding: "the same bits", what is on record as different, or "cannot tell" and why

At the end the command says for each group but A whether A or this group is better; with only two runs this
may be left out. It takes the validation losses, in nats, of the pairs with the same seed, at the last step
that all of them and the first run have evaluated. If trainer.max_steps differs between the groups, each loss
is that of the step trainer.max_steps of its run. For each seed it takes the difference of the losses. If the
mean of n differences is farther from zero than t * s / sqrt(n), the group with the lower losses is better.
Here s is the standard deviation of the differences, and t the 97.5 % point of Student's t distribution with
n - 1, but at most 10, degrees of freedom (a paired t-test at the level of 5 %). Otherwise, with fewer than
three seeds, or if the losses have different meanings, the verdict is "cannot tell". If all pairs with the
same seed have the same bits, the verdict is "the same bits".

Exit code 0: all that was compared has the same bits; 1: something differs, or a snapshot is damaged; 2: a
run is missing or cannot be read, two runs have no step in common, or an option is wrong. If there are two
groups, the verdict decides instead of 0 and 1: 0 for "the same bits", 3 if A is better, 4 if B is better, 1
otherwise. --json prints one JSON object instead of the lines, and draws no picture. The object has the groups
as {name: {seed: run}}, what was found on each pair, and the verdicts.
"""

import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
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
SAME = "the same bits"
CODES = {SAME: 0, "A is better": 3, "B is better": 4}  # exit codes of verdicts; 1 for any other
# 97.5 % points of Student's t distribution with 2 to 10 degrees of freedom. With more the last one is used,
# which is a little too large.
T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# The validation losses of two runs cannot be compared if one of these facts differs.
MEANING = {"data", "data.block_size", "data.val_fraction", "tokenizer", "trainer.eval_windows"}


class Run(NamedTuple):
    """A run's files: run.json as `history`, settings and the like as `facts`, {step: Store} as `stores`."""

    name: str
    file: Path  # metrics.jsonl
    records: Sequence[Mapping[str, Any]]
    history: Mapping[str, Any]
    facts: Mapping[str, str]
    stores: Mapping[int, Store]


class Comparison(NamedTuple):
    """The lines to print on two runs. If `differences` is empty, what was compared has the same bits."""

    one: str  # the names of the runs
    other: str
    facts: Sequence[str]
    differences: Sequence[str]
    not_compared: Sequence[str]
    finding: str


class Verdict(NamedTuple):
    """Which of two groups of runs is better: A, or the group `other`. Losses are in nats per token."""

    other: str  # the name of the other group
    facts: Mapping[str, tuple[str, str]]  # {name of a fact that differs: its values in both groups}
    steps: tuple[int, int]  # at which the losses of A and of the other group are compared; -1 for none
    pairs: Mapping[str, tuple[float, float]]  # {seed: losses of the run of A and of the other run}
    mean: float | None  # of the differences, the other loss minus the loss of A; None for fewer than 3 seeds
    standard_deviation: float | None
    verdict: str


def read_run(name: str) -> Run:
    """Return a run whose folder is on a disk of this machine. The run's snapshots are listed, not read.

    `name` is the path of a run folder or a metrics.jsonl. Raises UserError if there is no such path, if the
    folder's config.yaml cannot be used, or if a driver for snapshot.path is not installed. Raises OSError if
    the records cannot be read. If the snapshots cannot be listed, raises OSError or an error of fsspec's
    driver.
    """
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name} is not there: give a run folder such as out/default, or a metrics.jsonl")
    folder, file = (path.parent, path) if path.is_file() else (path, path / "metrics.jsonl")
    places = map(Store, reversed(possible_places(str(folder))))  # the first one counts
    stores = {step: store for store in places for step in store.steps()}
    history = load_history(folder) or {}
    return Run(name, file, list(read_records(file)), history, read_facts(folder, history), stores)


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


def read_facts(folder: Path, history: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: value} of a run's settings, data, tokenizer, software and numbers of workers.

    The values are from config.yaml in `folder`, and from `history`, the content of run.json. The result is
    empty if either is missing, or if run.json has no `inputs`. The fact "changes" lists changes of settings
    during the run. Settings that are not known are left out. Raises UserError if config.yaml cannot be read.
    """
    config, inputs = folder / "config.yaml", history.get("inputs")
    if not inputs or not config.is_file():
        return {}
    found = {key: value for key, value in read_file(str(config)).items() if key in settings()}
    changes = [
        f"{'; '.join(change['settings'])} after step {change['step']}"
        for change in history.get("changes", [])
    ]
    workers = dict.fromkeys(str(entry.get("workers")) for entry in history.get("generations", []))
    found |= {"run_dir": "", "changes": ", ".join(changes), "workers": ", then ".join(workers)}
    return {key: str(value) for key, value in (found | flatten(inputs)).items()}


def affects_result(key: str) -> bool:
    """Return whether the fact named `key` can change the result, with trainer.reduction=exact."""
    return settings()[key].affects_result if key in settings() else key != "workers"


def find_differing(one: Run, other: Run) -> list[str]:
    """Return the names of the facts that differ between two runs.

    A fact that is missing in one of the runs does not differ: an older version may not have recorded it, such
    as software.kernels.
    """
    return [key for key in one.facts if key in other.facts and one.facts[key] != other.facts[key]]


def compare_facts(one: Run, other: Run) -> tuple[list[str], str]:
    """Return (a line for each fact that differs, the finding).

    The finding names the differing facts that can change the result or, if there are none, all that differ.
    If no fact differs, or a run has no facts, the finding begins with "cannot tell".
    """
    if not one.facts or not other.facts:
        return [], "cannot tell: settings are not on record, give run folders"
    differing = find_differing(one, other)
    causes = [key for key in differing if affects_result(key)]
    lines = [
        f"{'*' if key in causes else ' '} {key}: {one.facts[key]} -> {other.facts[key]}" for key in differing
    ]
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
    the same step, or if another version of this program wrote a snapshot. Raises UnreadableSnapshot if a
    snapshot cannot be read.
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
    same, alone = f"{SAME}: {len(pairs)} values", len(ours.keys() ^ theirs.keys())
    if alone:
        not_compared.append(f"not compared: {alone} values, in one run only")
    if saved is None:
        not_compared.append("not compared: tensors, as no step has a snapshot of both runs")
    else:
        same += f", tensors of step {saved}"
        differences += compare_snapshots(one, other, saved)
    return Comparison(
        one.name, other.name, [best, *facts], differences, not_compared, finding if differences else same
    )


def group_runs(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Return {name: group}; a group is {seed: run}, and the names are A, B, C and so on.

    Each run of a group differs from the group's first run in no fact that can change the result, apart from
    the seed. There are no groups if the settings of a run are not on record.
    """
    groups = dict[str, dict[str, Run]]()
    if not all(run.facts for run in runs):
        return groups
    for run in runs:
        seed = run.facts["seed"]
        for group in groups.values():
            differing = {key for key in find_differing(first_of(group), run) if affects_result(key)}
            if seed not in group and differing <= {"seed"}:
                group[seed] = run
                break
        else:
            groups[chr(ord("A") + len(groups))] = {seed: run}
    return groups


def first_of(group: Mapping[str, Run]) -> Run:
    return next(iter(group.values()))


def judge(differences: Sequence[float], name: str = "B") -> tuple[float | None, float | None, str]:
    """Return (mean of the differences, their standard deviation, verdict).

    The module's docstring has the rule. `differences` has, for each seed, the loss of the group `name` minus
    the loss of A, in nats. With fewer than three differences, mean and standard deviation are None.
    """
    count = len(differences)
    if count < 3:
        return None, None, "cannot tell: needs three seeds"
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    margin = T[min(count - 3, len(T) - 1)] * deviation / math.sqrt(count)
    better = f"{name if mean < 0 else 'A'} is better"
    return mean, deviation, better if abs(mean) > margin else "cannot tell"


def decide(one: Mapping[str, Run], other: Mapping[str, Run], name: str, same: Collection[str]) -> Verdict:
    """Return the verdict on A, the group `one`, and the group `other`, whose name is `name`.

    `same` has the names of the runs that have the same bits as the run with which they were compared.
    """
    first, second = first_of(one), first_of(other)
    differing = [key for key in find_differing(first, second) if key != "seed"]
    shown = [key for key in differing if affects_result(key)] or differing
    losses = {seed: (read_losses(one[seed]), read_losses(other[seed])) for seed in one if seed in other}
    ends = int(first.facts["trainer.max_steps"]), int(second.facts["trainer.max_steps"])
    if ends[0] == ends[1]:  # else the learning rates at one step are those of different schedules
        evaluated = [found.keys() for both in losses.values() for found in both]
        last = max(set(read_losses(first)).intersection(*evaluated), default=-1)
        ends = last, last
    pairs = {
        seed: (a[ends[0]], b[ends[1]]) for seed, (a, b) in losses.items() if ends[0] in a and ends[1] in b
    }
    mean, deviation, verdict = judge([b - a for a, b in pairs.values()], name)
    meanings = [key for key in differing if key in MEANING]
    if losses and all(other[seed].name in same for seed in losses):
        verdict = SAME
    elif meanings:
        verdict = f"cannot tell: val/loss depends on {', '.join(meanings)}"
    facts = {key: (first.facts[key], second.facts[key]) for key in shown}
    return Verdict(name, facts, ends, pairs, mean, deviation, verdict)


def read_losses(run: Run) -> dict[int, float]:
    """Return {step: validation loss in nats per token} of a run."""
    return {step: value for (step, name), value in read_values(run).items() if name == "val/loss"}


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


def describe(comparisons: Sequence[Comparison], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the lines to print on pairs of runs and on groups."""
    for found in comparisons:
        yield from ("", f"{found.one} and {found.other}:", *found.facts, *found.differences)
        yield from (*found.not_compared, found.finding)
    for verdict in verdicts:
        other, (first, second) = verdict.other, verdict.steps
        yield ""
        for place, name in enumerate(("A", other)):
            facts = [f"{key}={values[place]}" for key, values in verdict.facts.items()]
            yield f"{name}: {', '.join(facts) or 'nothing on record differs'}"
        if verdict.pairs:
            yield f"val/loss of A at step {first}, of {other} at step {second}, and {other} - A:"
        for seed, (a, b) in verdict.pairs.items():
            yield f"  seed {seed}: {a:.4f}, {b:.4f}, {b - a:+.3g}"
        if verdict.mean is not None:
            yield f"mean {verdict.mean:+.3g}, standard deviation {verdict.standard_deviation:.3g}"
        yield verdict.verdict


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
    parser.add_argument("--json", action="store_true", help="print one JSON object, and draw no picture")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(name) for name in (options.first, *options.others)]
        groups = group_runs(runs)
        others = [*groups.items()][1:]
        pairs = [(groups["A"].get(seed, runs[0]), run) for _, group in others for seed, run in group.items()]
        comparisons = [compare(*pair) for pair in pairs or [(runs[0], run) for run in runs[1:]]]
    except (UnreadableSnapshot, OSError) as error:
        raise UserError(f"the runs cannot be compared: {reason_of(error)}") from None
    same = {found.other for found in comparisons if not found.differences}
    verdicts = [decide(groups["A"], group, name, same) for name, group in others]
    if options.json:
        content = {
            "groups": {
                name: {seed: run.name for seed, run in group.items()} for name, group in groups.items()
            },
            "comparisons": [found._asdict() for found in comparisons],
            "verdicts": [verdict._asdict() for verdict in verdicts],
        }
        lines = [json.dumps(content, indent=1)]
    else:
        lines = [*tabulate(runs), *draw(runs, options.plot)]
        # The comparison of two runs with the same settings has said all.
        is_told = len(runs) > 2 or any(
            found.pairs and any(map(affects_result, found.facts)) for found in verdicts
        )
        lines += describe(comparisons, verdicts if is_told else [])
    write_lines(lines)
    if len(verdicts) == 1:
        return CODES.get(verdicts[0].verdict, 1)
    return int(any(found.differences for found in comparisons))
