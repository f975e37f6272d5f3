"""Who holds a run folder and its snapshots, and how to drop the claim of a job that is gone."""

from pathlib import Path

from mingpt.errors import UserError
from mingpt.snapshot import Claim, Holder
from mingpt.snapshot.claim import LEASE_S
from mingpt.snapshot.lookup import possible_places


def show_claims(where: str, release: bool) -> list[str]:
    """A line for each claim to a run folder and to its snapshots. Raises UserError."""
    if "://" not in where and not Path(where).is_dir():
        raise UserError(f"{where} is no folder: give a run folder such as out/default, or a URL of snapshots")
    lines = []
    for place in dict.fromkeys([where, *possible_places(where)]):
        claim = Claim(place, place)
        try:
            _, holder, _ = claim.read_newest()
            if holder is None:
                continue
            lines.append(f"{place}: {describe(holder)}")
            if release and not holder.released:
                claim.drop()
                lines.append(f"{place}: released")
        except Exception as error:  # each driver raises exceptions of its own
            raise UserError(f"the claim to {place} cannot be used: {type(error).__name__}: {error}") from None
    return lines or [f"{where}: not claimed"]


def describe(holder: Holder) -> str:
    """Who holds a claim, or held it last, and whether its job lives as far as this machine can see."""
    if holder.released:
        return f"free; last held by {holder.sentence()}"
    states = {
        True: "which is running",
        False: "which is gone: the next job takes over at once",
        None: f"which this machine cannot see: its claim holds until {LEASE_S:g} s after it was last renewed",
    }
    return f"claimed by {holder.sentence()}, {states[holder.is_alive()]}"
