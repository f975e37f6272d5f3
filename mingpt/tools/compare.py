"""Find where two runs begin to differ, and why: python -m mingpt compare RUN RUN

A RUN is a run folder or a metrics.jsonl. The snapshots of a run may also lie at its snapshot.path.
Prints the settings and other metadata that differ, with * if they can change the result; the first value of
each metric that differs; the tensors that differ in the newest snapshots of the same step; and the cause.
Exit code 0: the values that both runs have, and these snapshots, are bit-identical; 1: they differ; 2: a run
is missing or cannot be read, or the runs have nothing in common.
"""

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of
from mingpt.base.paths import typed_path
from mingpt.config import flatten, settings, to_dict
from mingpt.config.cli import read_file
from mingpt.report import load_history, read_records
from mingpt.snapshot import Snapshot, SnapshotStore
from mingpt.snapshot.lookup import possible_places

TIMINGS = ("step_s", "data_s", "tokens_per_s", "mfu")
# Metadata that only change the rounding; the parallelism does so only under trainer.reduction=fast.
NUMERICS = ("trainer.dtype", "trainer.compile", "trainer.reduction", "trainer.fsdp_param_dtype")
PARALLELISM = ("workers", "trainer.parallel", "trainer.shard_optimizer")
MICRO_BATCH = "trainer.micro_batch_size"
SAMPLE_ORDER = ("seed", "audit")  # the audit is a digest of the tokens that the workers were fed
FIRST_RECORDS = 10  # small differences grow, so only the first ones tell rounding from other causes
MAX_ROUNDING = 0.1  # of the noise between neighbouring records
MAX_VALUE = 1e30  # larger values are left out: their squares could overflow
log = logging.getLogger(__name__)
Pair = tuple[float, float]
Metadata = Mapping[str, tuple[Any, Any]]  # the values of both runs, by key


class TensorDifference(NamedTuple):
    """A tensor that differs between two snapshots, from byte `first_byte` of its content on.

    `first_byte` is None if the tensor is in one snapshot alone, or has other types or shapes in the two.
    """

    name: str
    first_byte: int | None = None
    max_abs_diff: float = 0.0
    argmax: Sequence[int] = ()  # the index of the element that differs most


class Comparison(NamedTuple):
    """The differences between two runs."""

    metadata: Metadata  # settings, data, software and workers that differ
    value_count: int  # values, by step and metric, that both runs have
    unmatched_count: int  # values that one run alone has
    first_values: Mapping[str, tuple[int, Pair]]  # {metric: (step, values)} of the first difference
    cause: str  # in words; without meaning if `is_same`
    snapshot_step: int | None  # None if the runs have no snapshots of the same step
    tensor_count: int  # tensors in either snapshot
    tensors: Sequence[TensorDifference]

    @property
    def is_same(self) -> bool:
        return not (self.first_values or self.tensors)


def read_values(path: Path) -> dict[tuple[int, str], float]:
    """Return {(step, metric): value} of a metrics.jsonl without integers and timings; {} if it is missing."""
    return {
        (record["step"], name): value
        for record in read_records(path)
        for name, value in record.items()
        if isinstance(value, float) and abs(value) < MAX_VALUE and name not in TIMINGS
    }


def open_newest(runs: Sequence[str]) -> list[Snapshot]:
    """Open one snapshot per run, all of the same step: the newest at which none is too damaged to be opened.

    Empty if there is no such step. A damaged snapshot is logged in one line, and still used if its manifest
    and headers are valid. Raises UnreadableSnapshot if a snapshot cannot be read now; no older step is tried.
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


def read_metadata(run: Path, snapshot: Snapshot | None) -> dict[str, Any]:
    """Return {key: value} of a run's settings, data, software, numbers of workers, and changed settings.

    The last two are from run.json; the rest is from the manifest of `snapshot` or, if that is None, the
    settings alone from config.yaml. Empty without either. Raises UserError for a bad config.yaml.
    """
    config, history = run / "config.yaml", load_history(run)
    if snapshot:
        kept = {name: snapshot.manifest.get(name) for name in ("tokenizer", "software", "audit")}
        found = flatten(to_dict(snapshot.config) | kept) | {"data": snapshot.manifest["data"]["sha256"]}
    elif config.is_file():
        found = read_file(str(config))
    else:
        return {}
    workers = [str(entry.get("workers")) for entry in history["generations"]] if history else []
    changes = history["changes"] if history else []  # settings changed on purpose, perhaps changed back
    return found | {"run_dir": None, "workers": ", then ".join(dict.fromkeys(workers)), "changes": changes}


def compare_tensors(one: Snapshot, other: Snapshot) -> Iterator[TensorDifference]:
    """Yield the tensors that differ: those of `one`, in the order of its files, then those that it lacks."""
    for name in one.file_of | other.file_of:
        ours, theirs = (run.read(name) if name in run.file_of else None for run in (one, other))
        if ours is None or theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield TensorDifference(name)
            continue
        differs = ours.reshape(-1).view(torch.uint8) != theirs.reshape(-1).view(torch.uint8)
        if differs.any():
            gaps = (ours.double() - theirs.double()).abs()
            argmax = [int(index) for index in torch.unravel_index(gaps.argmax(), gaps.shape)]
            yield TensorDifference(name, int(differs.int().argmax()), float(gaps.max()), argmax)


def classify(curve: Sequence[Pair]) -> str | None:
    """Return why two loss curves are likely to differ; None if they differ in fewer than three records.

    `curve` has the values of both runs at each step. "rounding": the first differences are far smaller than
    the noise between neighbouring records, which is estimated from second differences. "another order of
    samples": the mean difference is zero within three standard errors. Otherwise "another computation".
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


def explain(metadata: Metadata, is_known: bool, is_fast: bool, likely: str | None) -> str:
    """Return in words why two runs differ: the metadata that explain it, else what the losses look like.

    `metadata` has what differs. `likely` is the result of `classify`. `is_known` says that both runs have
    snapshots, `is_fast` that one has trainer.reduction=fast.
    """
    numerics = list(NUMERICS)
    if MICRO_BATCH in metadata and likely == "rounding":  # with dropout it is more than rounding
        numerics += [MICRO_BATCH, "audit"]  # the digests are of micro-batches
    rounding = [key for key in metadata if key in numerics or key.startswith("software.")]
    rounding += [key for key in PARALLELISM if key in metadata and is_fast]
    causes = [key for key in metadata if affects_result(key) and key not in rounding]
    other = [key for key in causes if key not in SAMPLE_ORDER]
    if causes:
        kind = "another computation" if other else "another order of samples"
        return f"{kind}: {', '.join(other or causes)}"
    if rounding and likely in (None, "rounding"):
        return f"rounding: {', '.join(rounding)}"
    looks = (
        f"the losses differ like {likely}" if likely else "too few losses differ to say what they look like"
    )
    if not is_known:
        return looks
    return (
        f"{looks}; {', '.join(rounding) or 'the metadata'} cannot explain it: the program was changed, or a "
        "machine computed wrongly, which trainer.replay_every checks"
    )


def affects_result(key: str) -> bool:
    """Whether this metadata can change the result: a setting says so itself; other keys do, but `workers`."""
    setting = settings().get(key)
    return setting.affects_result if setting else key != "workers"


def compare(*runs: str) -> Comparison:
    """Compare two local runs. Raises UserError if one cannot be read, or if they have nothing in common."""
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
    ours, theirs = map(read_metadata, paths, snapshots or (None, None))
    metadata = {key: (ours[key], theirs[key]) for key in ours if key in theirs and ours[key] != theirs[key]}
    first_values: dict[str, tuple[int, Pair]] = {}
    for (step, name), pair in pairs.items():
        if pair[0] != pair[1]:
            first_values.setdefault(name, (step, pair))
    likely = classify([pair for (_, name), pair in pairs.items() if name == "train/loss"])
    is_fast = "fast" in (ours.get("trainer.reduction"), theirs.get("trainer.reduction"))
    return Comparison(
        metadata,
        len(pairs),
        len(one.keys() ^ other.keys()),
        first_values,
        explain(metadata, bool(snapshots), is_fast, likely),
        snapshots[0].manifest["step"] if snapshots else None,
        len({name for snapshot in snapshots for name in snapshot.file_of}),
        tensors,
    )


def render(found: Comparison) -> Iterator[str]:
    """Yield the lines that the command prints."""
    for key, (one, other) in found.metadata.items():
        yield f"{'*' if affects_result(key) else ' '} {key}: {one} -> {other}"
    yield from render_differences(found)
    same = f"the same bits: {found.value_count} values, {found.tensor_count} tensors"
    yield same if found.is_same else found.cause


def render_differences(found: Comparison) -> Iterator[str]:
    """Yield lines that say where values and tensors begin to differ; none if they are bit-identical."""
    for name, (step, (one, other)) in found.first_values.items():
        last_place = np.spacing(np.float32(max(abs(one), abs(other))))
        units = f"{abs(one - other) / last_place:.3g} units in the last place of float32"
        yield f"{name} first differs at step {step}: {one} and {other}, {units}"
    unlike = [tensor.name for tensor in found.tensors if tensor.first_byte is None]
    differing = [tensor for tensor in found.tensors if tensor.first_byte is not None]
    if unlike:
        yield f"step {found.snapshot_step}: in one run alone or of another shape or type: {', '.join(unlike)}"
    if differing:
        first, most = differing[0], max(differing, key=lambda tensor: tensor.max_abs_diff)
        yield (
            f"step {found.snapshot_step}: {len(differing)} of {found.tensor_count} tensors differ, the first "
            f"one is {first.name} from its byte {first.first_byte} on; by {most.max_abs_diff:.3g} at most, "
            f"in {most.name} at {list(most.argmax)}"
        )


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt compare", __doc__)
    parser.add_argument(
        "runs", nargs=2, type=typed_path, metavar="RUN", help="a run folder or a metrics.jsonl"
    )
    found = compare(*parser.parse_args(arguments).runs)
    write_lines(render(found))
    return 0 if found.is_same else 1
