"""The run folder on each node: one folder that all nodes share, or a different folder on each node's disk.

If nodes share no disk, the first worker of each node writes the run's records to the node's own folder. If
snapshot.path is null, it also writes snapshots there; a sharded state is written on two nodes. When a
generation (the workers between two restarts) begins, the nodes agree on the run's id, and the run's records
are copied to all nodes. So any node may die, and a node that joins gets the records.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from mingpt.base.errors import NodeRefused, PeersMissing, UserError, meaning_of
from mingpt.base.files import remove_quietly, write_atomic
from mingpt.base.paths import describe_obstacle
from mingpt.base.processes import this_process
from mingpt.base.system import OutOfTime, run_within
from mingpt.config import Config, differences, flatten, to_dict
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import find_program
from mingpt.report import is_reported, load_history, read_job_start, read_records
from mingpt.snapshot.layout import memory_of
from mingpt.training.claim import Claim, Holder

# Settings that change no result but must be the same on all workers.
SAME_EVERYWHERE = ("trainer.eval_only", "trainer.parallel", "trainer.shard_optimizer", "trainer.fsdp_reshard")
DISK_S = 60.0  # seconds within which a disk must answer, else the start is refused
OWN_HISTORY = re.compile(
    rb'\s*{\s*"id": ?"[0-9a-f]{32}"'
)  # how the run.json of a run begins, also if damaged
REPLACED_FILES = ("run.json", "config.yaml", "metrics.jsonl", "loss.png")
HISTORY_FILES = ("metrics.jsonl", "run.json")  # run.json last: it shows that there is a run
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The run folder's path, what this rank writes there, and whether all ranks see the same folder."""

    path: Path
    is_kept: bool  # whether this rank writes the run's records: the lowest rank that sees the folder does
    keeps_snapshots: bool  # whether this rank writes snapshots: the lowest rank that sees their folder does
    is_shared: bool  # whether all ranks see the same run folder
    # The lowest rank that sees each folder of snapshots; only the first rank's snapshots count as durable.
    snapshot_writers: Sequence[int] = (0,)


def check_same_settings(config: Config, context: DistributedContext) -> None:
    """Raise UserError on all ranks if a setting that must be the same on all ranks differs. Collective.

    If nodes run different code, or different versions of torch, that is only logged.
    """
    settings, path = to_dict(config), config.snapshot.path
    same = {name: flatten(settings)[name] for name in SAME_EVERYWHERE}
    same["snapshot.path"] = "null" if path is None else ("a URL" if "://" in path else "a folder")
    program = find_program() if context.launch.has_several_nodes else ""
    told = context.all_gather_object((settings, same, program))
    hosts = [place.host for place in context.places]
    programs = {host: program for host, (*_, program) in zip(hosts, told, strict=True)}
    first_settings, first, _ = told[0]
    for host, (settings, other, _) in zip(hosts, told, strict=True):
        changed = differences(first_settings, settings)
        changed += [f"{name}: {first[name]} -> {other[name]}" for name in same if first[name] != other[name]]
        if changed:
            raise UserError(
                f"the workers were started with different settings: those on {host} differ from those on "
                f"{hosts[0]} ({'; '.join(changed)})"
            )
    if context.rank == 0 and len(set(programs.values())) > 1:
        log.warning(f"the nodes run different programs, which may compute different bits: {programs}")


def open_run_folder(config: Config, context: DistributedContext) -> RunFolder:
    """Make the run folder on every node, and find out which ranks write to it. Collective.

    With trainer.eval_only no folder is made, and no rank writes. Raises the errors of `refuse_where_it_fails`
    if `check_is_ours` raises an error, if a folder cannot be written to, or if a disk does not answer.
    """
    path = Path(config.run_dir)
    if config.trainer.eval_only:
        return RunFolder(path, False, False, True)  # nothing is written

    def open_here() -> None:
        try_disks(config)
        check_is_ours(path)
        make_run_dir(path)

    refuse_where_it_fails(context, open_here)
    keepers = snapshot_keepers = lowest_ranks_there(path, context)
    if config.snapshot.path is not None:
        is_folder = "://" not in config.snapshot.path
        place = Path(config.snapshot.path)
        snapshot_keepers = lowest_ranks_there(place, context) if is_folder else [0] * context.world_size
    return RunFolder(
        path,
        is_kept=keepers[context.rank] == context.rank,
        keeps_snapshots=snapshot_keepers[context.rank] == context.rank,
        is_shared=len(set(keepers)) == 1,
        snapshot_writers=sorted(set(snapshot_keepers)),
    )


def claim_run_folder(context: DistributedContext, folder: RunFolder) -> Claim:
    """Claim the run folder until the job ends, on each rank that writes the run's records. Collective.

    All other ranks get a Claim that is not acquired. Waits as `Claim.acquire` does. If another job holds the
    folder, or if the folder cannot be written to, raises the errors of `refuse_where_it_fails`.
    """
    launch = context.launch
    agents = tuple(dict.fromkeys(context.all_gather_object(this_process(launch.agent_pid))))
    job, generation = launch.job or uuid.uuid4().hex, uuid.uuid4().hex
    claim = Claim(folder.path, Holder(agents, job, generation, since=time.time()))
    context.exit.on_job_end(claim.release)

    def acquire() -> None:
        try:
            if folder.is_kept:
                claim.acquire()
        except OSError as error:
            raise not_writable(folder.path, error) from None

    refuse_where_it_fails(context, acquire)
    return claim


def refuse_where_it_fails(context: DistributedContext, work: Callable[[], object]) -> None:
    """Call `work` on every rank. If `work` raises UserError on any rank, end the generation. Collective.

    In a job's first generation, or if the launcher does not number its generations (rdzv_round), all ranks
    then raise UserError. In later generations all ranks raise UserError only if `work` fails on all nodes.
    Otherwise the job goes on without the nodes on which `work` fails: the ranks of these nodes raise
    NodeRefused, and all other ranks raise PeersMissing.
    """

    def attempt() -> UserError | None:
        try:
            work()
        except UserError as error:
            return error
        return None

    found = zip(context.places, context.gather_on_all(attempt), strict=True)
    failed = {place.node_rank: (place.host, error) for place, error in found if error is not None}
    if not failed:
        return
    nodes = {place.node_rank for place in context.places}
    goes_on = (context.launch.rdzv_round or 1) > 1 and len(failed) < len(nodes)
    if not goes_on:
        host, error = next(iter(failed.values()))
        if context.launch.has_several_nodes:
            error.args = (f"{error} (on {host})",)
        raise error
    refuse_nodes(context, failed)


def refuse_nodes(context: DistributedContext, failed: Mapping[int, tuple[str, str | UserError]]) -> NoReturn:
    """Raise NodeRefused on the nodes in `failed`, {node rank: (host, why)}; PeersMissing on all others."""
    if context.launch.node_rank in failed:
        host, why = failed[context.launch.node_rank]
        raise NodeRefused(f"{why}; the job goes on without {host}")
    hosts = ", ".join(dict.fromkeys(host for host, _ in failed.values()))
    sentence = f"the job goes on without {hosts}: {next(iter(failed.values()))[1]}"
    log.info(sentence)
    raise PeersMissing(sentence)


def try_disks(config: Config) -> None:
    """Raise UserError if the disk of a path does not answer within DISK_S seconds.

    The paths are run_dir, snapshot.path and data.path, except URLs.
    """
    for place in (config.run_dir, config.snapshot.path, config.data.path):
        if place is not None and "://" not in place:
            try:
                run_within(DISK_S, functools.partial(os.path.exists, place))
            except OutOfTime:
                raise UserError(
                    f"the disk of {place} does not answer within {DISK_S:g} s: look at its mount"
                ) from None


def check_is_ours(path: Path) -> None:
    """Raise UserError if the folder `path` has files that a run would replace, but no run.json of a run.

    Empty files do not count: a run leaves an empty metrics.jsonl if the disk is full when it starts.
    """
    found = [name for name in REPLACED_FILES if holds_something(path / name)]
    if not found:
        return
    if os.path.isfile(path / "run.json"):  # opening a pipe, for example, would block
        with contextlib.suppress(OSError), (path / "run.json").open("rb") as file:
            if OWN_HISTORY.match(file.read(100)):
                return
    raise UserError(
        f"run_dir {path} holds {', '.join(found)}, which a run would replace, and no run.json of a run: "
        "choose another run_dir, or move these files away"
    )


def holds_something(path: Path) -> bool:
    """Return whether there is anything at `path`, such as a link or a pipe, but an empty file."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_size > 0 or not stat.S_ISREG(status.st_mode)


def make_run_dir(path: Path) -> None:
    """Make the run folder with a log.txt. Raises UserError if the folder cannot be made or written to.

    But if the folder exists, and its disk is full, no error is raised, and log.txt may be missing.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "log.txt").open("a").close()
    except OSError as error:
        if meaning_of(error) == "full" and path.is_dir():
            return  # each file that cannot be written will be reported, and tried again
        raise not_writable(path, error) from None


def not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"run_dir {path} cannot be written to: {describe_obstacle(path, error)}")


def lowest_ranks_there(path: Path, context: DistributedContext) -> list[int]:
    """Return, for each rank, the lowest rank whose node sees the same folder at `path`. Collective.

    If there are several nodes, the first worker of each node writes a file, and all ranks check which of
    these files they see. Each file has a name that no node has looked for before, because network file
    systems remember which files were missing. A rank that sees none of the files is taken to see the folder
    that rank 0 sees.
    """
    if not context.launch.has_several_nodes:
        return [0] * context.world_size
    is_first = context.launch.local_rank == 0
    probe = path / f"probe-{uuid.uuid4().hex}"
    probes = context.gather_on_all(lambda: probe.name if is_first and write_probe(probe) else None)

    def look() -> int:
        seen = (rank for rank, name in enumerate(probes) if name and os.path.exists(path / name))
        return next(seen, 0)

    keepers = context.gather_on_all(look)
    if probes[context.rank]:
        remove_quietly(probe)  # all ranks have looked
    return keepers


def write_probe(path: Path) -> bool:
    """Create the empty file `path`, and its folder; return whether that worked. A failure is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.info(f"{path} cannot be created ({error.strerror}): taken for the folder that rank 0 sees")
        return False
    return True


class NodeRecords(NamedTuple):
    """What run.json on a rank's node says about a run."""

    was_started: bool  # whether an earlier generation of this job has passed the checks of its start
    last_step: int  # the last step that is recorded; -1 if there is no run
    run_id: str | None  # None: there is no run
    token: str  # a random id; only that of rank 0 is used
    job_start: int | None  # the step from which the newest job in run.json began; None: not recorded
    durable_step: int  # the step of the newest snapshot on disk; 0 for none
    distrusted: list[dict[str, Any]]  # an entry for each replay that found different results
    generations: int  # the number of generations on record
    is_reported: bool  # whether the end of the run is on record; also true if nothing is recorded


@dataclass(frozen=True)
class KnownRun:
    """What the records of all nodes say about the run; the same on all ranks."""

    run_id: str | None  # None: there is no run yet
    token: str  # a random id, different in each generation; the run's id if the run begins in this generation
    is_restart: bool  # false in a job's first generation
    job_start: int | None  # the step from which this job began; None in its first generation, or if unknown
    durable_step: int  # the step of the newest snapshot on disk that any node's run.json records; 0 for none
    distrusted: list[dict[str, Any]]  # see NodeRecords: the entries of all nodes, each once
    # More than the number of generations that any node has on record, and at least each `before_generation`.
    generation: int
    is_reported: bool  # whether the end of the run is on record on all nodes


def read_known_run(context: DistributedContext, folder: RunFolder, job: str) -> KnownRun:
    """Return what the run.json files in the run folders of all nodes say about the run. Collective.

    `job` is the random id of the present job. Raises the errors of `choose_run`.
    """
    own = read_node_records(folder.path, job)
    # The TCPStore may have been lost with its host: then only run.json shows an earlier generation.
    told = context.all_gather_object((own, own.was_started or context.was_started()))
    records, is_restart = [one for one, _ in told], any(was_started for _, was_started in told)
    distrusted = [entry for one in records for entry in one.distrusted]
    starts = [one.job_start for one in records if one.job_start is not None]
    numbers = [entry["before_generation"] for entry in distrusted]
    return KnownRun(
        choose_run(context, folder.path, records),
        records[0].token,
        is_restart,
        max(starts, default=None) if is_restart else None,
        max(one.durable_step for one in records),
        [entry for entry, _ in itertools.groupby(sorted(distrusted, key=str))],
        # A run that goes on in a new run folder has fewer generations on record than its snapshots count.
        max([1 + max(one.generations for one in records), *numbers]),
        all(one.is_reported for one in records),
    )


def read_node_records(path: Path, job: str) -> NodeRecords:
    """Return what run.json in the folder `path` says about a run; `job` is the present job's random id."""
    history = load_history(path) or {"generations": []}
    generations = history["generations"]
    return NodeRecords(
        history.get("job") == job,
        generations[-1]["to_step"] if generations else -1,
        history["id"] if generations else None,
        uuid.uuid4().hex,
        read_job_start(history),
        history.get("durable_step", 0),
        history.get("distrusted", []),
        len(generations),
        is_reported(path),
    )


def choose_run(context: DistributedContext, path: Path, records: Sequence[NodeRecords]) -> str | None:
    """Return the id of the run in the run folders at `path`; None if there is no run yet.

    `records` has the records of each rank's node, by rank. If the folders hold different runs, all ranks
    raise UserError, unless an earlier generation of this job worked on one of these runs. Then the job goes
    on with that run: the ranks of nodes with a different run raise NodeRefused, and all other ranks raise
    PeersMissing.
    """
    found = [(node, place) for node, place in zip(records, context.places, strict=True) if node.run_id]
    # If two parts of a job began without each other, the part that has come further goes on.
    kept = max((node for node, _ in found), default=None, key=lambda node: node[:3])
    others = [(node, place) for node, place in found if kept and node.run_id != kept.run_id]
    if kept is None or not others:
        return kept and kept.run_id
    listed = "; ".join(dict.fromkeys(f"run {str(node.run_id)[:8]} on {place.host}" for node, place in found))
    sentence = (
        f"the nodes hold different runs in {path} ({listed}): give the job another run_dir, or remove {path} "
        "from the nodes of the other run"
    )
    if not kept.was_started:
        raise UserError(sentence)
    refuse_nodes(context, {place.node_rank: (place.host, sentence) for _, place in others})


def share_history(context: DistributedContext, folder: RunFolder, step: int) -> None:
    """Copy metrics.jsonl and run.json from one node's run folder to those of all other nodes. Collective.

    The files are copied from the folder for which `measure_history` returns the largest tuple. If a folder
    cannot be written to, that is only logged.
    """
    extents = context.gather_on_all(lambda: measure_history(folder.path, step) if folder.is_kept else None)
    ranked = [(*entry, -rank) for rank, entry in enumerate(extents) if entry is not None]
    if not ranked:
        return
    source = -max(ranked)[-1]
    contents = {}
    for name in HISTORY_FILES:
        contents[name] = read_on(source, context, functools.partial(read_if_there, folder.path / name))
    if not folder.is_kept or context.rank == source:
        return
    try:
        for name, content in contents.items():
            write_atomic(folder.path / name, content, sync="file")
    except OSError as error:
        log.warning(f"{folder.path} cannot be written ({error.strerror}): its records have a gap")


def measure_history(path: Path, step: int) -> tuple[int, int, int] | None:
    """Return (number of distrusted entries, records up to `step`, generations) of the run folder `path`.

    `distrusted` in run.json has an entry for each replay that found different results. Returns None if there
    is no valid run.json, or if metrics.jsonl cannot be read.
    """
    history = load_history(path)
    if history is None:
        return None
    try:
        # A record that is there twice counts once.
        records = {(record["step"], "val/loss" in record) for record in read_records(path / "metrics.jsonl")}
    except OSError:
        return None
    distrusted = history.get("distrusted", [])
    return len(distrusted), sum(at <= step for at, _ in records), len(history["generations"])


def read_if_there(path: Path) -> bytes:
    """Return the file's bytes; b"" if the file is missing, because a run that died at once has no records."""
    return path.read_bytes() if path.exists() else b""


def read_on(source: int, context: DistributedContext, read: Callable[[], bytes]) -> bytes:
    """Call `read` only on rank `source`; on all ranks, return the bytes that `read` returns. Collective.

    The bytes are sent without pickling. If `read` raises UserError, all ranks raise that error.
    """
    content = b""

    def read_here() -> int:
        nonlocal content
        content = read() if context.rank == source else b""
        return len(content)

    buffer = torch.empty(sum(context.gather_on_all(read_here)), dtype=torch.uint8)
    memory_of(buffer)[: len(content)] = content
    context.transport.broadcast(buffer, source)
    return content or buffer.numpy().tobytes()
