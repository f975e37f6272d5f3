"""The run folder on each node, one that all nodes share or one of its own for each, and who owns it.

Where nodes share no disk, the first worker of each keeps the records and snapshots of the run in its own.
When a generation starts, these nodes agree on the run's id and hand over its records, so any node may die,
and a node that joins is given them.

A job claims its run folders and its snapshots, so that no other job writes there. The rank that writes to a
place holds the claim to it for the whole job; see claim.py.
"""

import errno
import functools
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from mingpt.base.errors import ClaimLost, NodeRefused, PeersMissing, UserError
from mingpt.base.files import DriverError, write_atomic
from mingpt.config import Config, differences, to_dict
from mingpt.distributed import DistributedContext, write_stderr
from mingpt.report import load_history, read_records, read_run_id
from mingpt.snapshot import this_process
from mingpt.training.claim import RENEW_S, Claim, Holder

T = TypeVar("T")
HISTORY_FILES = ("metrics.jsonl", "run.json")  # run.json last: it tells that there is a run
RECHECK_S = 0.5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The run folder as this rank sees it."""

    path: Path
    is_kept: bool  # this rank writes the records there: the lowest one of those that see the folder
    keeps_snapshots: bool  # likewise for the folder of the snapshots
    is_shared: bool  # all ranks see the same run folder
    snapshots_rank: int = 0  # the lowest rank that keeps snapshots: its own are those of the job
    snapshots_are_shared: bool = True  # all ranks see the same folder of snapshots


def check_same_settings(config: Config, context: DistributedContext) -> None:
    """Raises UserError if the workers were started with settings that compute something else. Collective."""
    path = config.snapshot.path
    kind = "null" if path is None else ("a URL" if "://" in path else "a folder")
    trainer = config.trainer
    told = (
        to_dict(config),
        trainer.eval_only,
        kind,
        trainer.parallel,
        trainer.shard_optimizer,
        trainer.fsdp_reshard,
        platform.node(),
    )
    (first, *first_rest, first_host), *others = context.all_gather_object(told)
    for settings, *rest, host in others:
        changed = differences(first, settings)
        names = (
            "trainer.eval_only",
            "snapshot.path",
            "trainer.parallel",
            "trainer.shard_optimizer",
            "trainer.fsdp_reshard",
        )
        changed += [
            f"{name}: {one} -> {other}"
            for name, one, other in zip(names, first_rest, rest, strict=True)
            if one != other
        ]
        if changed:
            raise UserError(
                f"the workers were started with different settings: those on {host} differ from those on "
                f"{first_host} ({'; '.join(changed)})"
            )


def open_run_folder(config: Config, context: DistributedContext) -> RunFolder:
    """Make the run folder on every node. Collective. Raises as `refuse_where_it_fails` does."""
    path = Path(config.run_dir)
    if config.trainer.eval_only:
        return RunFolder(path, False, False, True)  # nothing is written
    refuse_where_it_fails(context, lambda: make_run_dir(path))
    keeper = lowest_rank_there(path, context)
    snapshots_keeper = keeper
    if config.snapshot.path is not None:
        is_folder = "://" not in config.snapshot.path
        snapshots_keeper = lowest_rank_there(Path(config.snapshot.path), context) if is_folder else 0
    keepers = context.all_gather_object((keeper, snapshots_keeper))
    return RunFolder(
        path,
        is_kept=keeper == context.rank,
        keeps_snapshots=snapshots_keeper == context.rank,
        is_shared=len({one for one, _ in keepers}) == 1,
        snapshots_rank=min(other for _, other in keepers),
        snapshots_are_shared=len({other for _, other in keepers}) == 1,
    )


def refuse_where_it_fails(context: DistributedContext, work: Callable[[], T]) -> T:
    """The result of `work` on a node's own disk. Collective.

    Raises UserError on all ranks if it fails on any in a job's first generation, or on all nodes. Later the
    job goes on without the node that fails: NodeRefused there, PeersMissing on the others.
    """

    def attempt() -> tuple[T | None, str | None]:
        try:
            return work(), None
        except UserError as error:
            return None, str(error)

    result, mine = context.run_with_heartbeat(attempt)
    found = context.all_gather_object((mine, platform.node(), context.launch.node_rank))
    failed = {node: (host, message) for message, host, node in found if message is not None}
    if not failed:
        return result  # type: ignore[return-value]
    goes_on = (context.launch.round or 1) > 1 and len(failed) < len({node for *_, node in found})
    if not goes_on:
        raise UserError(next(iter(failed.values()))[1])
    refuse_nodes(context, failed)


def refuse_nodes(context: DistributedContext, failed: dict[int, tuple[str, str]]) -> NoReturn:
    """Raises NodeRefused on the nodes {node rank: (host, why)}, and PeersMissing on the others."""
    if context.launch.node_rank in failed:
        host, why = failed[context.launch.node_rank]
        raise NodeRefused(f"{why}; the job goes on without {host}")
    hosts = ", ".join(dict.fromkeys(host for host, _ in failed.values()))
    sentence = f"the job goes on without {hosts}: {next(iter(failed.values()))[1]}"
    log.info("%s", sentence)
    raise PeersMissing(sentence)


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
    remember what was not there. One that cannot is taken to see what rank 0 sees.
    """
    if not context.launch.has_several_nodes:
        return 0
    is_first = context.launch.local_rank == 0
    name = f"probe-{uuid.uuid4().hex}"
    is_written = context.run_with_heartbeat(lambda: is_first and write_probe(path / name))
    probes = context.all_gather_object(name if is_written else None)
    seen = context.run_with_heartbeat(
        lambda: [rank for rank, probe in enumerate(probes) if probe and is_there(path / probe)]
    )
    if is_written:
        remove_probe(path / name)  # all have looked
    return min(seen, default=0)


def write_probe(path: Path) -> bool:
    """Whether it could be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.info("%s cannot be created (%s): taken for the folder that rank 0 sees", path, error.strerror)
        return False
    return True


def is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # a folder that this rank cannot read is none that it shares


def remove_probe(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s could not be removed (%s)", path, error.strerror)


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
        write_atomic(path, content, sync="file")
    except OSError as error:
        log.warning("%s cannot be written (%s): the records on this node have a gap", path, error.strerror)
        return False
    return True


class WatchedClaim:
    """The claim that another rank of this job has acquired, with that number, as this rank sees it."""

    def __init__(self, claim: Claim, number: int, holder: Holder) -> None:
        self.claim, self.number, self.holder = claim, number, holder

    def check(self) -> None:
        """As Claim.check, but on another machine a listing may be late: only a newer claim is a loss."""
        try:
            number, other, _ = self.claim.read_newest()
        except DriverError as error:
            log.info("the claim to %s cannot be read (%s): going on", self.claim.what, error)
            return
        is_replaced = other is not None and number == self.number and other.job != self.holder.job
        if number > self.number or is_replaced:
            raise self.claim.loss(other, self.holder)


class Claims:
    """The claims that this rank holds for its job, if any; renewed in the background until `release`.

    The first is to the run folder.
    """

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.watched: list[WatchedClaim] = []  # of other ranks, to places that this one writes to, too
        self.released = threading.Event()
        self.is_held, self.checked_at = True, float("-inf")
        for claim in claims:
            threading.Thread(target=self.renew, args=(claim,), daemon=True).start()

    def watch(self, watched: Sequence[WatchedClaim]) -> None:
        """Have `check` look at these claims, too."""
        self.watched = list(watched)

    def renew(self, claim: Claim) -> None:
        is_failing = False
        while not self.released.wait(RENEW_S):
            try:
                claim.renew()
                is_failing = False
            except DriverError as error:  # `check` decides
                if not is_failing:
                    log.warning("the claim to %s cannot be renewed: %s", claim.what, error)
                is_failing = True

    def check(self) -> None:
        """Raises ClaimLost if a place is another job's by now, or a later generation's."""
        for claim in self.claims:
            claim.check()
        for watched in self.watched:
            watched.check()

    def check_run_dir(self) -> None:
        """`check` for the run folder alone: a record does not wait for an object store."""
        for claim in self.claims[:1]:
            claim.check()

    def may_write(self) -> bool:
        """Whether the run folder was this job's less than RECHECK_S ago: the process may have been frozen."""
        if self.is_held and time.monotonic() - self.checked_at > RECHECK_S:
            try:
                self.check_run_dir()
            except ClaimLost:
                self.is_held = False
            self.checked_at = time.monotonic()
        return self.is_held

    def was_started(self) -> bool:
        """Whether an earlier generation of this job had passed its checks, as far as the places tell."""
        return any(claim.was_started for claim in self.claims)

    def mark_started(self) -> None:
        """Tell later generations that the job has passed the checks of its start."""
        for claim in self.claims:
            try:
                claim.mark_started()
            except DriverError as error:  # the store tells it too
                log.info("the claim to %s could not be marked: %s", claim.what, error)

    def release(self) -> None:
        """The job ends here."""
        self.released.set()
        for claim in self.claims:
            try:
                claim.release()
            except DriverError as error:
                log.info("the claim to %s could not be released: %s", claim.what, error)
        self.claims = []


def claim_places(config: Config, context: DistributedContext, folder: RunFolder) -> Claims:
    """Claim what this rank is going to write to. Collective; raises UserError if another job holds it."""
    launch = context.launch
    agents = context.all_gather_object(this_process(launch.agent_pid))
    holder = Holder(
        tuple(dict.fromkeys(agents)),
        job=launch.job or "",
        slurm_job=launch.slurm_job,
        slurm_restarts=launch.slurm_restarts,
    )
    places = places_of(config, folder)
    claims = refuse_where_it_fails(context, lambda: acquire_all(places, holder))
    context.exit.on_job_end(claims.release)
    claims.watch(watch_snapshots(config, context, folder, claims))
    return claims


def watch_snapshots(
    config: Config, context: DistributedContext, folder: RunFolder, claims: Claims
) -> list[WatchedClaim]:
    """The claim to a folder of snapshots that all ranks see, on those that do not hold it. Collective."""
    path = config.snapshot.path
    last = [(claim.number, claim.holder) for claim in claims.claims[-1:]]  # places_of: the snapshots'
    last = context.broadcast_object(last, folder.snapshots_rank)
    is_holder = context.rank == folder.snapshots_rank
    if is_holder or not folder.snapshots_are_shared:
        return []
    what = f"run_dir {config.run_dir}" if path is None else f"snapshot.path {path}"
    place = Claim(path or config.run_dir, what)
    if place.store.is_process_private:
        return []
    return [WatchedClaim(place, number, holder) for number, holder in last if holder is not None]


def places_of(config: Config, folder: RunFolder) -> list[Claim]:
    """The run folder, and `snapshot.path` where that is somewhere else and not this process's memory."""
    claims = [Claim(config.run_dir, f"run_dir {config.run_dir}")] if folder.is_kept else []
    if config.snapshot.path is not None and folder.keeps_snapshots:
        snapshots = Claim(config.snapshot.path, f"snapshot.path {config.snapshot.path}")
        roots = {os.path.realpath(claim.store.root) for claim in (*claims, snapshots)}
        is_elsewhere = len(roots) > len(claims) or not snapshots.store.is_local
        if is_elsewhere and not snapshots.store.is_process_private:
            claims.append(snapshots)
    return claims


def acquire_all(places: list[Claim], holder: Holder) -> Claims:
    """All or none. Raises UserError."""
    claims = Claims(places)  # the first is renewed while the second waits
    for claim in places:
        try:
            claim.acquire(holder, on_wait=write_line)
            if claim.holder is not None:
                holder = replace(holder, job=claim.holder.job)
        except UserError:
            claims.release()
            raise
        except DriverError as error:
            claims.release()
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{claim.what} cannot be written to: {reason}") from None
    return claims


def write_line(line: str) -> None:
    """To the terminal alone: log.txt belongs to the job that holds the folder."""
    write_stderr(f"{line}\n")
