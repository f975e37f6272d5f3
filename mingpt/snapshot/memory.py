"""Snapshots in a node's memory, so that a killed worker costs only a few steps.

These are ordinary snapshots, written to a folder such as /dev/shm, whose files outlive the workers but not
the node. This folder has one subfolder for each run, named after the random id in run.json and the path of
the run folder. There, each writer of each generation (the workers between two restarts) has a subfolder of
its own. A writer's first snapshot replaces those of earlier generations. The memory must have room for two
states: the snapshot that is kept, and the one that is being written. When a run has finished, and its last
snapshot is on disk, its snapshots in memory are removed.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import time
from pathlib import Path

from mingpt.snapshot.store import Store

LEFTOVER_S = 24 * 3600.0
RUN_NAME = re.compile(r"mingpt-[0-9a-f]{32}-[0-9a-f]{8}")  # of a run's folder
GENERATION_NAME = re.compile(r"[0-9a-f]{32}")  # of the folder of a generation's writer
log = logging.getLogger(__name__)


class MemoryFolder:
    """The folder, under `path` (such as /dev/shm), for memory snapshots of the run `run_id` in `run_dir`."""

    def __init__(self, path: str, run_id: str, run_dir: Path) -> None:
        # A copy of a run folder is another run with the same id.
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.root = Path(path) / f"mingpt-{run_id}-{place}"

    def stores(self) -> list[Store]:
        """Return the Stores in this folder, one for each of `generation_folders`, sorted by path."""
        return [Store(str(path)) for path in generation_folders(self.root)]

    def create(self, store: Store, nbytes: int) -> None:
        """Create the folder of `store`, a subfolder of the run's folder, if two states have room there.

        A state has `nbytes` bytes. The space that the run's older snapshots take counts as room. Raises
        OSError if there is no room, if a folder cannot be made, or if `is_private` refuses the run's folder.
        """
        self.root.mkdir(mode=0o700, exist_ok=True)
        if not is_private(self.root):
            raise OSError(errno.EPERM, f"{self.root.name} there is a link, or another user can write to it")
        used = sum(path.stat().st_size for path in self.root.rglob("step_*"))
        if shutil.disk_usage(self.root).free + used < 2 * nbytes:
            raise OSError(errno.ENOSPC, f"No space left for two states, {2 * nbytes / 1e6:.1f} MB")
        Path(store.url).mkdir(exist_ok=True)

    def clear(self, kept: int = -1) -> None:
        """Remove the snapshots in this folder, except those of the step `kept`. An OSError is ignored."""
        for store in self.stores():
            with contextlib.suppress(OSError):
                store.clear(kept)
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def remove_leftovers(self) -> None:
        """Remove other runs' memory snapshots if unchanged for a day (`is_leftover`); log a line per run."""
        for root in self.root.parent.glob("mingpt-*"):
            if root != self.root and is_leftover(root):
                log.warning(f"removing {root} from memory: another run left it more than a day ago")
                for folder in generation_folders(root):
                    with contextlib.suppress(OSError):
                        Store(str(folder)).clear()
                with contextlib.suppress(OSError):
                    root.rmdir()


def run_folders(path: str, run_dir: Path) -> list[MemoryFolder]:
    """Return the MemoryFolders that exist under `path` (such as /dev/shm) for runs in `run_dir`."""
    place = MemoryFolder(path, "", run_dir).root.name.rpartition("-")[2]
    roots = sorted(root.name for root in Path(path).glob(f"mingpt-*-{place}"))
    return [MemoryFolder(path, name.split("-")[1], run_dir) for name in roots if RUN_NAME.fullmatch(name)]


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder (no link) of this user, and its mode lets no other user write.

    The name of a run's folder can be guessed, so another user may have made a folder or a link of that name.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and is_closed and status.st_uid == os.getuid()


def generation_folders(root: Path) -> list[Path]:
    """Return the generations' folders in a run's folder, sorted; [] if `is_private(root)` is false."""
    if not is_private(root):
        return []
    # If another agent on this machine removes the folder meanwhile, glob finds nothing.
    return sorted(path for path in root.glob("*") if GENERATION_NAME.fullmatch(path.name) and path.is_dir())


def is_leftover(root: Path) -> bool:
    """Return whether `root` is a run's folder whose `generation_folders` have not changed for a day.

    Returns False if there are no such folders, and if one of them disappears during this call.
    """
    folders = generation_folders(root)
    if not RUN_NAME.fullmatch(root.name) or not folders:
        return False
    try:
        # A folder changes when a file in it is created, renamed or removed.
        newest_change = max(folder.stat().st_mtime for folder in folders)
    except FileNotFoundError:
        return False  # another job is removing it or writing there
    return newest_change < time.time() - LEFTOVER_S
