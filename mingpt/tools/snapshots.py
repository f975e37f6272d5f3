"""The command `snapshots`, which lists the snapshots of a run."""

import logging
import re
from collections.abc import Iterator, Sequence

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.paths import typed_path
from mingpt.snapshot import Store
from mingpt.snapshot.lookup import possible_places
from mingpt.snapshot.manifest import validation_loss

MANIFEST = re.compile(r"(?:(damaged|suspect)-[0-9]+-)?step_([0-9]{8,19})\.json")
ROW = "{:>9} {:>9} {:>12}  {}"
log = logging.getLogger(__name__)


def list_snapshots(store: Store) -> Iterator[tuple[int, str]]:
    """Yield (step, row of the printed table) for each snapshot in `store`.

    Logs the errors that reading a snapshot raises. A snapshot that a run has renamed as damaged or suspect is
    not read. Raises UnreadableSnapshot if the folder cannot be read.
    """
    for match in filter(None, map(MANIFEST.fullmatch, store.list_names())):
        loss, size, state, step = "-", "-", match[1], int(match[2])
        if state is None:
            try:
                manifest, state = store.read(step).manifest, "valid"
                known, size = validation_loss(manifest), f"{manifest.bytes / 1e6:,.1f} MB"
                loss = "-" if known is None else f"{known:.4f}"
            except (CorruptSnapshot, UnreadableSnapshot, UserError) as error:  # or of another version
                if match[0] not in store.list_names():
                    continue  # a job that runs has removed it meanwhile
                log.warning(f"{match[0]}: {error}")
                state = "damaged" if isinstance(error, CorruptSnapshot) else "unreadable"
        yield step, ROW.format(step, loss, size, state)


def main(arguments: Sequence[str]) -> int:
    """List the snapshots of a run: step, validation loss at that step, size, and state.

    The state is valid, damaged, suspect (a worker may have computed wrongly), or unreadable. A snapshot is
    unreadable if it cannot be read now, or if another version of this program wrote it. Each snapshot is read
    and checked byte by byte, except snapshots that a run has already renamed as damaged or suspect. Nothing
    is changed.
    """
    parser = CommandParser("python -m mingpt snapshots", main.__doc__)
    parser.add_argument(
        "run", type=typed_path, metavar="RUN", help="run folder or snapshot folder; a path or URL"
    )
    run = parser.parse_args(arguments).run
    try:
        found = (sorted(list_snapshots(Store(place))) for place in possible_places(run))
        rows = next(filter(None, found), None)
    except UnreadableSnapshot as error:
        raise UserError(str(error)) from None
    if not rows:
        raise UserError(f"there is no snapshot in {run}: give a run folder such as out/default")
    write_lines([ROW.format("step", "val/loss", "size", "state"), *(line for _, line in rows)])
    return 0
