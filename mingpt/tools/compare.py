"""Find where two runs begin to differ, and why: python -m mingpt compare RUN RUN

A RUN is a run folder or a metrics.jsonl. The snapshots of a run may also lie at its snapshot.path.
Prints the settings, data and versions that differ, with * if they can change the result; what one run alone
has; the first value of each metric that differs; the tensors that differ in the newest snapshots of the same
step; and the cause, which follows from the settings, data and versions alone. Exit code 0: the values that
both runs have, and these snapshots, are bit-identical; 1: they differ; 2: a run is missing or cannot be read,
or the runs have nothing in common.
"""

import logging
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
from mingpt.config.cli import build, read_file
from mingpt.report import load_history, read_records
from mingpt.snapshot import Snapshot, SnapshotStore
from mingpt.snapshot.lookup import possible_places

TIMINGS = ("step_s", "data_s", "tokens_per_s", "mfu")
# Metadata that only change the rounding; the parallelism does so only under trainer.reduction=fast.
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
# Values from before the first update, and the settings that act in updates alone.
BEFORE_UPDATE = (("val/loss", 0), ("train/loss", 1), ("grad_norm", 1))
UPDATE = ("optimizer.", "trainer.max_steps", "trainer.on_nonfinite")
MAX_VALUE = 1e30  # larger values are left out: they have no float32 beside them
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
    steps: Sequence[int]  # of the values that both runs have, one for each value
    unmatched: Mapping[str, Sequence[int]]  # {run: steps of the values that it alone has}
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
    """Return {key: value} of a run's settings, data, tokenizer, software and numbers of workers.

    The settings are those of the manifest of `snapshot` or, if that is None, of config.yaml; run.json has the
    rest. Also has the settings that were changed on purpose. Empty without either. Raises UserError for a bad
    config.yaml.
    """
    config, history = run / "config.yaml", load_history(run) or {"generations": []}
    if snapshot:
        manifest = snapshot.manifest
        kept = {name: manifest[name] for name in ("tokenizer", "software", "audit") if name in manifest}
        found = flatten(to_dict(snapshot.config) | kept) | {"data": manifest["data"]["sha256"]}
    elif config.is_file():
        given = {key: value for key, value in read_file(str(config)).items() if key in settings()}
        found = flatten(to_dict(build(given))) | flatten(history.get("inputs", {}))
    else:
        return {}
    workers = dict.fromkeys(str(entry.get("workers")) for entry in history["generations"])
    return found | {
        "run_dir": None,
        "workers": ", then ".join(workers),
        "changes": history.get("changes", []),
    }


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


def explain(metadata: Metadata, runs: Sequence[Mapping[str, Any]], differs_early: bool) -> str:
    """Return in words why two runs differ.

    `metadata` has what differs, `runs` all that is known of each run. `differs_early` tells that a value from
    before the first update differs.
    """
    is_fast = any(run.get("trainer.reduction") == "fast" for run in runs)
    has_dropout = any(run.get("model.dropout") for run in runs)
    prefixes = NUMERICS + PARALLELISM if is_fast else NUMERICS
    rounding = [key for key in metadata if key.startswith(prefixes) and not (has_dropout and key in MASKS)]
    # The audit, a digest of the tokens, differs if a setting or the data do.
    causes = [key for key in metadata if affects_result(key) and key not in (*rounding, "audit")]
    if differs_early and not rounding:
        causes = [key for key in causes if not key.startswith(UPDATE)]
    if causes:
        return f"another computation: {', '.join(causes)}"
    if not all("data" in run for run in runs):
        return (
            "cannot tell why: settings, data and software of both runs are not on record here; give the run "
            "folders, with config.yaml and run.json"
        )
    if rounding:
        return f"rounding: {', '.join(rounding)}"
    return (
        "nothing on record explains it: the program was changed, or a machine computed wrongly, which "
        "trainer.replay_every checks"
    )


def affects_result(key: str) -> bool:
    """Whether this metadata can change the result, or the losses that are recorded."""
    setting = settings().get(key)
    if setting is None:
        return key != "workers"
    return setting.affects_result or key == "trainer.eval_windows"


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
    unmatched = {runs[0]: one.keys() - other.keys(), runs[1]: other.keys() - one.keys()}
    differs_early = any((name, step) in BEFORE_UPDATE for name, (step, _) in first_values.items())
    return Comparison(
        metadata,
        [step for step, _ in pairs],
        {run: [step for step, _ in mine] for run, mine in unmatched.items() if mine},
        first_values,
        explain(metadata, (ours, theirs), differs_early),
        snapshots[0].manifest["step"] if snapshots else None,
        len({name for snapshot in snapshots for name in snapshot.file_of}),
        tensors,
    )


def render(found: Comparison) -> Iterator[str]:
    """Yield the lines that the command prints."""
    for key, (one, other) in found.metadata.items():
        yield f"{'*' if affects_result(key) else ' '} {key}: {one} -> {other}"
    yield from render_differences(found)
    for run, steps in found.unmatched.items():
        yield f"only {run} has {len(steps)} values of steps {min(steps)} to {max(steps)}"
    if found.snapshot_step is None:
        yield "no tensors are compared: the runs have no snapshot of the same step"
    values = f"{len(found.steps)} values of {len(set(found.steps))} steps"
    yield f"the same bits: {values}, {found.tensor_count} tensors" if found.is_same else found.cause


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
