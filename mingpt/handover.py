"""What nodes that share no disk hand over to each other when a generation starts: the run's id and records.

So any node may die, and whoever is left has them; a node that joins is given them.
"""

import functools
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mingpt.distributed import DistributedContext
from mingpt.errors import UserError
from mingpt.report import load_history, read_records, read_run_id, replace_file
from mingpt.run_folder import RunFolder, refuse_nodes

HISTORY_FILES = ("metrics.jsonl", "run.json")  # run.json last: it tells that there is a run
log = logging.getLogger(__name__)


class NodeRun(NamedTuple):
    """The run in a node's run folder, and whether the node had a part in an earlier generation of the job."""

    run_id: str | None
    last_step: int  # that its run.json tells of
    host: str
    node_rank: int
    was_started: bool


def agree_on_run_id(context: DistributedContext, folder: RunFolder, was_started: bool) -> str:
    """The id of the run in the run folders, a new one if there is none. Collective.

    Raises UserError if they hold different runs; if the job goes on, NodeRefused on the nodes that hold
    another one than the job, and PeersMissing on the others.
    """
    node_rank = context.launch.node_rank
    mine = NodeRun(read_run_id(folder.path), last_step(folder.path), platform.node(), node_rank, was_started)
    found = context.all_gather_object(mine)
    ids = list(dict.fromkeys(node.run_id for node in found if node.run_id is not None))
    if len(ids) < 2:
        return ids[0] if ids else context.new_run_id()
    sentence = describe_runs(found, ids, folder.path)
    # Of two parts of a job that have begun apart, the one that has come further goes on.
    of_job = [node for node in found if node.was_started and node.run_id is not None]
    if not of_job:
        raise UserError(sentence)
    kept = max(of_job, key=lambda node: (node.last_step, str(node.run_id))).run_id
    others = [node for node in found if node.run_id not in (None, kept)]
    refuse_nodes(context, {node.node_rank: (node.host, sentence) for node in others})


def last_step(path: Path) -> int:
    history = load_history(path)
    return int(history["generations"][-1]["to_step"]) if history and history["generations"] else 0


def describe_runs(found: Sequence[NodeRun], ids: Sequence[str], path: Path) -> str:
    hosts = {
        run_id: ", ".join(dict.fromkeys(node.host for node in found if node.run_id == run_id))
        for run_id in ids
    }
    listed = "; ".join(f"run {run_id[:8]} on {hosts[run_id]}" for run_id in ids)
    return (
        f"the nodes hold different runs in {path} ({listed}): give the job another run_dir, or remove {path} "
        "where it is another run's"
    )


class HistoryExtent(NamedTuple):
    """How far the records in a run folder go."""

    records: int  # up to the step from which the generation starts
    generations: int


def share_history(context: DistributedContext, folder: RunFolder, step: int) -> None:
    """Give every run folder the records of the run up to `step`. Collective.

    They come from the folder that has most of them; of several, from that with most generations.
    """
    if folder.is_shared:
        return
    extent = context.run_with_heartbeat(
        lambda: describe_history(folder.path, step) if folder.is_kept else None
    )
    extents = context.all_gather_object(extent)
    ranked = [(*entry, -rank) for rank, entry in enumerate(extents) if entry is not None]
    if not ranked:
        return
    source = -max(ranked)[-1]
    is_complete = True
    for name in HISTORY_FILES:
        read = functools.partial(read_file, folder.path / name, context.rank == source)
        content = context.run_with_heartbeat(read)
        content = context.broadcast_bytes(content, source)
        if folder.is_kept and context.rank != source and is_complete:
            is_complete = write_file(folder.path / name, content)


def describe_history(path: Path, step: int) -> HistoryExtent | None:
    """None if there is no history."""
    history: dict[str, Any] | None = load_history(path)
    if history is None:
        return None
    try:
        records = {(record["step"], "val/loss" in record) for record in read_records(path / "metrics.jsonl")}
    except OSError:
        return None
    return HistoryExtent(sum(at <= step for at, _ in records), len(history["generations"]))


def read_file(path: Path, reads: bool) -> bytes | None:
    """Empty where it cannot be read by now."""
    try:
        return path.read_bytes() if reads else None
    except OSError as error:
        log.warning("%s cannot be read (%s)", path, error.strerror)
        return b""


def write_file(path: Path, content: bytes) -> bool:
    """Whether it worked."""
    try:
        replace_file(path, content)
    except OSError as error:
        log.warning("%s cannot be written (%s): the records on this node have a gap", path, error.strerror)
        return False
    return True
