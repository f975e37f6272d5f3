"""The run folder on each node: one that all nodes share, or one of its own for each.

Where nodes share no disk, the first worker of each keeps the records and snapshots of the run in its own.
"""

import errno
import logging
import platform
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from mingpt.config import Config
from mingpt.distributed import DistributedContext
from mingpt.errors import NodeRefused, PeersMissing, UserError
from mingpt.settings import differences, to_dict

T = TypeVar("T")
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
