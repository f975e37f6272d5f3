"""Open a snapshot by the name of a file, or a folder's newest or best snapshot.

These functions are for commands, and for a new run that starts from another run's weights. No function here
renames or removes a file.
"""

import logging
import math
import os

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.config.cli import read_file
from mingpt.snapshot.layout import step_of, steps_in
from mingpt.snapshot.reading import Check, accept_all
from mingpt.snapshot.store import Snapshot, Store

log = logging.getLogger(__name__)


def open_snapshot(
    where: str, check: Check = accept_all, weights_only: bool = False, best: bool = False
) -> Snapshot:
    """Return the snapshot in the file or folder `where`, after the checks of `Store.read`.

    `where` is the path or URL of a snapshot's file, of a run folder, or of a folder of snapshots. "@best" at
    the end of a folder's name means `best`. For a folder, each of `possible_places` is searched in turn.
    There, snapshots are tried from the newest on; with `best`, from the lowest validation loss on, and those
    without a validation loss are left out. The first snapshot that can be used is returned; snapshots that
    were tried before are skipped with a log line. With `weights_only`, the file of the optimizer's state is
    not read beyond its header.

    Raises UserError if no snapshot can be used, or if `check` raises UserError. Also raises UserError if a
    snapshot that is tried has an unknown schema version, if the run's config.yaml cannot be used, or if no
    driver for a URL is installed. A driver that connects at once may raise its own errors.
    """
    if where.endswith("@best"):
        where, best = where.removesuffix("@best"), True
    folder, _, name = where.rstrip("/").rpartition("/")
    named = step_of(name)
    if named is not None:
        try:
            return Store(folder or ".").read(named, check, weights_only)
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            raise UserError(f"the snapshot {where} cannot be used: {error}") from None
    problems: list[str] = []
    for place in possible_places(where):
        store = Store(place)
        try:
            steps = steps_in(store.list_names(), "json")
        except UnreadableSnapshot as error:
            problems.append(str(error))
            continue
        if best:
            losses = store.losses_of(steps)
            pairs = sorted((loss, step) for step, loss in losses.items() if loss < math.inf)
            steps = [step for _, step in pairs]
        for step in steps:
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
        raise UserError(f"no snapshot in {where} can be used ({'; '.join(problems[:3])}): try another")
    place = where if "://" in where else os.path.abspath(where)
    raise UserError(
        f"there is no snapshot in {place}: give a run folder such as out/default, or a step_*.safetensors; "
        "if it is a model of Hugging Face's or nanoGPT's, import it first: python -m mingpt import SOURCE "
        "OUT (docs/data.md)"
    )


def possible_places(where: str) -> list[str]:
    """Return the folders or URLs where the snapshots of a run may be, in the order in which to look.

    `where` is the folder or URL of the run or of its snapshots. The setting `snapshot.path` comes first, if
    `where` is a local folder whose config.yaml has this setting, then `snapshots/` in `where`, then `where`
    itself. Raises UserError if the config.yaml cannot be used.
    """
    places = [f"{where.rstrip('/')}/snapshots", where]
    config = f"{where}/config.yaml"
    if "://" in where or not os.path.isfile(config):
        return places
    configured = read_file(config).get("snapshot.path", "null")
    return [configured, *places] if configured != "null" and isinstance(configured, str) else places
