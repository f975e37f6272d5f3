"""Where do two runs begin to differ, and why? python -m mingpt compare A B

A and B are run folders (their snapshots may lie elsewhere, as snapshot.path says) or metrics.jsonl files.
Prints what differs on record, where * can change the result; the first value of each metric that differs;
why; and the tensors that differ in the newest snapshots of the same step. Exit code 0: the same bits in all
that both have; 1: they differ; 2: a run is missing, or the two have nothing in common.
"""

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of
from mingpt.config import flatten, settings, to_dict
from mingpt.config.cli import read_file
from mingpt.report import load_history, read_records
from mingpt.snapshot import Snapshot, SnapshotStore
from mingpt.snapshot.lookup import possible_places

TIMINGS = ("step_s", "data_s", "tokens_per_s", "mfu")
ROUNDING = ("trainer.dtype", "trainer.compile", "trainer.reduction", "trainer.fsdp_param_dtype")
ORDER = ("seed", "audit")  # the audit is a digest of the tokens that workers were fed
# They change the order of sums under trainer.reduction=fast, and no bit under exact.
SHARING = ("workers", "trainer.parallel", "trainer.shard_optimizer")
FIRST_RECORDS = 10  # later ones may differ much, however little the first ones do
MAX_ROUNDING = 0.1  # of the noise from record to record
MAX_VALUE = 1e30
log = logging.getLogger(__name__)
Pair = tuple[float, float]
Changes = Mapping[str, tuple[Any, Any]]


class TensorDifference(NamedTuple):
    """`byte` is the first one that differs; None for tensors of other types or shapes, or in one run alone.

    Numbers differ most, by `largest`, at `index`.
    """

    name: str
    byte: int | None = None
    largest: float = 0.0
    index: Sequence[int] = ()


class Comparison(NamedTuple):
    """What differs of two runs."""

    changes: Changes  # of what is on record
    values: int  # of metrics, that both have
    unmatched: int  # that one alone has
    first: Mapping[str, tuple[int, Pair]]  # by metric: the step and the values that differ first
    cause: str
    step: int | None  # of the snapshots, if both have one of the same step
    tensor_count: int  # in either
    tensors: Sequence[TensorDifference]

    @property
    def is_same(self) -> bool:
        return not (self.first or self.tensors)


def read_values(path: Path) -> dict[tuple[int, str], float]:
    """{(step, metric): value} of what depends on the bits. Raises OSError."""
    return {
        (record["step"], name): value
        for record in read_records(path)
        for name, value in record.items()
        if isinstance(value, float) and abs(value) < MAX_VALUE and name not in TIMINGS
    }


def open_newest(runs: Sequence[str]) -> list[Snapshot]:
    """The newest snapshots of the same step, one of each run; none if there are none.

    A line tells of one that is damaged; it is used if it can be opened. Raises UnreadableSnapshot.
    """
    stores = [
        {step: store for store in map(SnapshotStore, possible_places(run)) for step in store.steps()}
        for run in runs
    ]
    for step in sorted(set.intersection(*map(set, stores)), reverse=True):
        found = []
        for run, store_of in zip(runs, stores, strict=True):
            try:
                found.append(store_of[step].open(step))
                store_of[step].verify(found[-1])
            except CorruptSnapshot as error:
                log.warning(f"the snapshot of step {step} of {run} is damaged: {error}")
        if len(found) == len(runs):
            return found
    return []


def on_record(run: str, snapshot: Snapshot | None) -> dict[str, Any]:
    """What the bits may depend on: settings, of the snapshot or else config.yaml, workers, data, software.

    Empty for bare metrics. Raises UserError.
    """
    config, history = Path(run) / "config.yaml", load_history(Path(run))
    if snapshot:
        kept = {name: snapshot.manifest.get(name) for name in ("tokenizer", "software", "audit")}
        given = flatten(to_dict(snapshot.config) | kept) | {"data": snapshot.manifest["data"]["sha256"]}
    elif config.is_file():
        given = read_file(str(config))
    else:
        return {}
    workers = [str(entry.get("workers")) for entry in history["generations"]] if history else []
    return given | {"run_dir": None, "workers": ", then ".join(dict.fromkeys(workers))}


def compare_tensors(one: Snapshot, other: Snapshot) -> Iterator[TensorDifference]:
    """Byte by byte, in the order of the files."""
    for name in one.file_of | other.file_of:
        ours, theirs = (run.read(name) if name in run.file_of else None for run in (one, other))
        if ours is None or theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield TensorDifference(name)
            continue
        differs = ours.reshape(-1).view(torch.uint8) != theirs.reshape(-1).view(torch.uint8)
        if differs.any():
            gaps = (ours.double() - theirs.double()).abs()
            index = [int(place) for place in torch.unravel_index(gaps.argmax(), gaps.shape)]
            yield TensorDifference(name, int(differs.int().argmax()), float(gaps.max()), index)


def likeness(curve: Sequence[Pair]) -> str | None:
    """What two curves, values of the same steps, differ like; None where too few differ to tell.

    Rounding: at first by far less than one value does from the next, whose noise the second differences tell.
    Other samples: by other noise, so that the mean is zero within three standard errors.
    """
    gaps = [other - one for one, other in curve if one != other]
    if len(gaps) < 3:
        return None
    values = [one for one, _ in curve]
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    noise = statistics.median(bends) / (0.6745 * math.sqrt(6))  # a standard deviation
    if statistics.median(map(abs, gaps[:FIRST_RECORDS])) < MAX_ROUNDING * noise:
        return "rounding"
    is_centred = abs(statistics.fmean(gaps)) <= 3 * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return "another order of samples" if is_centred else "another computation"


def explain(changes: Changes, is_known: bool, is_fast: bool, seen: str | None) -> str:
    """Why runs differ: by what differs on record, and where that does not tell, by what it looks like."""
    rounding = [key for key in changes if key in ROUNDING or key.startswith("software.")]
    rounding += [key for key in SHARING if key in changes and is_fast]
    causes = [key for key in changes if affects_result(key) and key not in rounding]
    other = [key for key in causes if key not in ORDER]
    if causes:
        kind = "another computation" if other else "another order of samples"
        return f"{kind}: {', '.join(other or causes)}"
    if rounding and seen in (None, "rounding"):
        return f"rounding: {', '.join(rounding)}"
    looks = f"the losses differ like {seen}" if seen else "too few losses differ to tell what that is like"
    if not is_known:
        return looks
    return (
        f"{looks}, which {', '.join(rounding) or 'nothing on record'} does not explain: another program, or "
        "a machine that computes wrongly, as trainer.replay_every would find"
    )


def affects_result(key: str) -> bool:
    """Whether this setting, or what else is on record, can change the result."""
    setting = settings().get(key)
    return setting.affects_result if setting else key != "workers"


def compare(*runs: str) -> Comparison:
    """Of two. Raises UserError if one is missing or cannot be read, or if they have nothing in common."""
    paths = [Path(run) for run in runs]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is not there: give a run folder such as out/default, or a metrics.jsonl")
    try:
        one, other = (read_values(path if path.is_file() else path / "metrics.jsonl") for path in paths)
        snapshots = open_newest(runs)
        tensors = list(compare_tensors(*snapshots)) if snapshots else []
    except (CorruptSnapshot, UnreadableSnapshot, OSError) as error:
        raise UserError(f"{' and '.join(runs)} cannot be compared: {reason_of(error)}") from None
    pairs = {key: (one[key], other[key]) for key in sorted(one.keys() & other.keys())}
    if not snapshots and not pairs:
        raise UserError(f"{' and '.join(runs)} have neither a record nor a snapshot of the same step")
    ours, theirs = map(on_record, runs, snapshots or (None, None))
    changes = {key: (ours[key], theirs[key]) for key in ours if key in theirs and ours[key] != theirs[key]}
    first = {}
    for (step, name), pair in pairs.items():
        if pair[0] != pair[1]:
            first.setdefault(name, (step, pair))
    seen = likeness([pair for (_, name), pair in pairs.items() if name == "train/loss"])
    is_fast = "fast" in (ours.get("trainer.reduction"), theirs.get("trainer.reduction"))
    return Comparison(
        changes,
        len(pairs),
        len(one.keys() ^ other.keys()),
        first,
        explain(changes, bool(ours and theirs), is_fast, seen),
        snapshots[0].manifest["step"] if snapshots else None,
        len({name for snapshot in snapshots for name in snapshot.file_of}),
        tensors,
    )


def render(found: Comparison) -> Iterator[str]:
    """Lines for a person."""
    for key, (one, other) in found.changes.items():
        yield f"{'*' if affects_result(key) else ' '} {key}: {one} -> {other}"
    yield from render_differences(found)
    same = f"the same bits: {found.values} values, {found.tensor_count} tensors"
    yield same if found.is_same else found.cause


def render_differences(found: Comparison) -> Iterator[str]:
    """Where values and tensors begin to differ."""
    for name, (step, (one, other)) in found.first.items():
        last_place = 2.0 ** (math.frexp(max(abs(one), abs(other)))[1] - 24)
        units = f"{abs(one - other) / last_place:.3g} units in the last place of float32"
        yield f"{name} first differs at step {step}: {one} and {other}, {units}"
    unlike = [tensor.name for tensor in found.tensors if tensor.byte is None]
    differing = [tensor for tensor in found.tensors if tensor.byte is not None]
    if unlike:
        yield f"step {found.step}: in one run alone, or of other types or shapes: {', '.join(unlike)}"
    if differing:
        first, most = differing[0], max(differing, key=lambda tensor: tensor.largest)
        yield (
            f"step {found.step}: {len(differing)} of {found.tensor_count} tensors differ, the first one is "
            f"{first.name} from its byte {first.byte} on; by {most.largest:.3g} at most, in {most.name} at "
            f"{list(most.index)}"
        )


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt compare", __doc__)
    parser.add_argument("runs", nargs=2, metavar=("A", "B"), help="a run folder or a metrics.jsonl")
    found = compare(*parser.parse_args(arguments).runs)
    write_lines(render(found))
    return 0 if found.is_same else 1
