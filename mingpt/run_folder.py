"""The run folder on each node: one that all nodes share, or one of its own for each, with the same history.

Where nodes share no disk, the first worker of each keeps the records of the run, so that any node may die and
whoever is left still has them. A node that joins is given them.
"""

import errno
import logging
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mingpt.config import Config
from mingpt.distributed import DistributedContext
from mingpt.errors import NodeRefused, PeersMissing, UserError
from mingpt.report import load_history, read_records, read_run_id, replace_file

HISTORY_FILES = ("metrics.jsonl", "run.json")  # run.json last: it tells that there is a run
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The run folder as this rank sees it."""

    path: Path
    is_kept: bool  # this rank writes the records there: the lowest one of those that see the folder
    keeps_snapshots: bool  # likewise for the folder of the snapshots
    is_shared: bool  # all ranks see the same folder


def open_run_folder(config: Config, context: DistributedContext) -> RunFolder:
    """Make the run folder on every node. Collective. Raises UserError."""
    path = Path(config.run_dir)
    if config.trainer.eval_only:
        return RunFolder(path, False, False, True)  # nothing is written
    context.raise_on_all_ranks(lambda: make_run_dir(path))
    keeper = lowest_rank_there(path, context)
    keepers = set(context.all_gather_object(keeper))
    snapshots_keeper = keeper
    if config.snapshot.path is not None:
        is_folder = "://" not in config.snapshot.path
        snapshots_keeper = lowest_rank_there(Path(config.snapshot.path), context) if is_folder else 0
    is_kept, keeps_snapshots = keeper == context.rank, snapshots_keeper == context.rank
    return RunFolder(path, is_kept, keeps_snapshots, len(keepers) == 1)


def make_run_dir(path: Path) -> None:
    """The run folder, which must be writable, but may have no room left. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "log.txt").open("a").close()
    except OSError as error:
        may_pass = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        if may_pass and path.is_dir():
            return  # each file that cannot be written is reported, and tried again
        raise UserError(f"run_dir {path} cannot be written to: {error.strerror}") from None


def lowest_rank_there(path: Path, context: DistributedContext) -> int:
    """The lowest rank whose node sees the same folder as this one. Collective.

    Each node writes a file under a name that nobody has looked for before, since network file systems
    remember what was not there.
    """
    if not context.launch.has_several_nodes:
        return 0
    probe = None
    if context.launch.local_rank == 0:
        probe = write_probe(path / f"probe-{uuid.uuid4().hex}")
    probes = context.all_gather_object(probe.name if probe else None)
    seen = [rank for rank, name in enumerate(probes) if name is not None and (path / name).exists()]
    context.all_gather_object(None)  # all have looked
    if probe is not None:
        probe.unlink(missing_ok=True)
    return min(seen, default=0)


def write_probe(path: Path) -> Path | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.info("%s cannot be created (%s): taken for the folder that rank 0 sees", path, error.strerror)
        return None
    return path


def agree_on_run_id(context: DistributedContext, folder: RunFolder, was_started: bool) -> str:
    """The id of the run in the run folders, a new one if there is none. Collective.

    Raises UserError if they hold different runs; NodeRefused and PeersMissing if the job goes on without the
    nodes that hold another one. `was_started`: this rank's node had a part in an earlier generation.
    """
    mine = read_run_id(folder.path)
    found = context.all_gather_object((mine, platform.node(), was_started))
    hosts: dict[str, list[str]] = {}
    for run_id, host, _ in found:
        if run_id is not None and host not in hosts.setdefault(run_id, []):
            hosts[run_id].append(host)
    if len(hosts) < 2:
        return next(iter(hosts), None) or context.new_run_id()
    listed = "; ".join(f"run {run_id[:8]} on {', '.join(names)}" for run_id, names in hosts.items())
    way_out = f"give the job another run_dir, or remove {folder.path} where it is another run's"
    sentence = f"the nodes hold different runs in {folder.path} ({listed}): {way_out}"
    of_job = {run_id for run_id, _, started in found if started and run_id is not None}
    if len(of_job) != 1:
        raise UserError(sentence)
    if mine is not None and mine not in of_job:
        raise NodeRefused(f"{sentence}; the job goes on without {platform.node()}")
    if context.rank == [started for _, _, started in found].index(True):
        log.warning("%s", sentence)
    others = [host for run_id, host, _ in found if run_id is not None and run_id not in of_job]
    raise PeersMissing(f"the job goes on without {', '.join(dict.fromkeys(others))}: {sentence}")


def share_history(context: DistributedContext, folder: RunFolder, step: int, log_every: int) -> None:
    """Give every run folder the records of the run up to `step`. Collective.

    They come from the folder with most generations among those whose records reach that step.
    """
    if folder.is_shared:
        return
    found = context.all_gather_object(describe_history(folder.path) if folder.is_kept else None)
    reach = step // log_every * log_every
    ranked = [
        (min(entry.last_step, reach), entry.generations, -rank)
        for rank, entry in enumerate(found)
        if entry is not None
    ]
    if not ranked:
        return
    source = -max(ranked)[2]
    for name in HISTORY_FILES:
        content = context.broadcast_object(read_file(folder.path / name), source)
        if folder.is_kept and context.rank != source and content is not None:
            write_file(folder.path / name, content)


class HistoryExtent(NamedTuple):
    """How far the records in a run folder go."""

    last_step: int
    generations: int


def describe_history(path: Path) -> HistoryExtent | None:
    """None if there is no history."""
    history = load_history(path)
    if history is None:
        return None
    try:
        last_step = max((record["step"] for record in read_records(path / "metrics.jsonl")), default=0)
    except OSError:
        return None
    return HistoryExtent(last_step, len(history["generations"]))


def read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None  # the other ranks keep theirs


def write_file(path: Path, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the records on this node have a gap", path, error.strerror)
