"""Open a snapshot for another program or another run: by a file's name, or the newest or best of a folder.

Nothing is renamed or removed in the folder.
"""

import logging
import os
from collections.abc import Iterable

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.config.cli import read_file
from mingpt.snapshot.layout import step_of, steps_in
from mingpt.snapshot.manifest import validation_loss
from mingpt.snapshot.reading import Check, accept_all
from mingpt.snapshot.store import Snapshot, SnapshotStore

PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
log = logging.getLogger(__name__)


def open_snapshot(
    where: str, check: Check = accept_all, weights_only: bool = False, best: bool = False
) -> Snapshot:
    """Open and verify a snapshot: that of the file `where`, or the newest valid one of the folder `where`.

    With `best`, `where` must be a folder, whose valid snapshot with the lowest validation loss is opened. In
    a folder, a bad snapshot, or one that `check` refuses, is skipped and logged in one line. With
    `weights_only`, only the headers of files of optimizer state are read. Raises UserError if no snapshot can
    be used, or if one is of another version.
    """
    folder, _, name = where.rstrip("/").rpartition("/")
    named = step_of(name)
    if named is not None and best:
        raise UserError(f"{where} is one snapshot: give its folder to use the best one there")
    if named is not None:
        try:
            return SnapshotStore(folder or ".").read(named, check, weights_only)
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            raise UserError(f"the snapshot {where} cannot be used: {error}") from None
    if name.lower().endswith(PICKLES) and not os.path.isdir(where):
        raise UserError(
            f"{where} is a pickle, which could run any code, and is not read: load it by torch.load(..., "
            "weights_only=True) and save it as safetensors or as a folder in Hugging Face's format, which "
            "snapshot.init_from takes; docs/data.md has the command for nanoGPT's ckpt.pt"
        )
    problems: list[str] = []
    for place in possible_places(where):
        store = SnapshotStore(place)
        try:
            names = store.list_names()
        except UnreadableSnapshot as error:
            problems.append(str(error))
            continue
        steps = steps_in(names, "json")
        for step in best_first(store, steps) if best else steps:
            try:
                return store.read(step, check, weights_only)
            except (CorruptSnapshot, UnreadableSnapshot) as error:
                log.warning(f"snapshot of step {step} in {place} skipped: {error}")
                problems.append(f"step {step}: {error}")
    if best and not problems:
        raise UserError(
            f"there is no best snapshot in {where}: with snapshot.keep_best=true a run saves one at an "
            "evaluation past step 0; take the newest one, without --best"
        )
    if problems:
        raise UserError(f"no snapshot in {where} can be used ({'; '.join(problems[:3])}): give another")
    place = where if "://" in where else os.path.abspath(where)
    raise UserError(
        f"there is no snapshot in {place}: give a run folder such as out/default, or a step_*.safetensors; a "
        "folder in Hugging Face's format is for transformers, or, on a local disk, for sample.py and "
        "snapshot.init_from"
    )


def best_first(store: SnapshotStore, steps: Iterable[int]) -> list[int]:
    """Return the steps whose manifest has their validation loss, lowest loss first; log bad manifests."""
    losses: dict[int, float] = {}
    for step in steps:
        try:
            loss = validation_loss(store.read_manifest(step))
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            log.warning(f"snapshot of step {step} in {store.url} skipped: {error}")
            continue
        if loss is not None:
            losses[step] = loss
    return sorted(losses, key=losses.__getitem__)


def possible_places(where: str) -> list[str]:
    """Return the places where the snapshots of a folder or URL may be, in the order in which to look.

    These are `snapshot.path` of the config.yaml in a local run folder, then `snapshots/` in the folder or
    URL, then the folder or URL itself. Raises UserError for a damaged config.yaml.
    """
    places = [f"{where.rstrip('/')}/snapshots", where]
    config = f"{where}/config.yaml"
    if "://" in where or not os.path.isfile(config):
        return places
    configured = read_file(config).get("snapshot.path", "null")
    return [configured, *places] if configured != "null" and isinstance(configured, str) else places
