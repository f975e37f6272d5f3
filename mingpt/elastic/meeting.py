"""From what an agent sees while it waits to the group that it proposes, if it is the one to lead it."""

from dataclasses import dataclass

from mingpt.elastic import decisions
from mingpt.elastic.decisions import WAITING, Entry
from mingpt.elastic.node import View

FIRST_CALL_S, LAST_CALL_S = 5.0, 1.5
STRAGGLERS_S = 10.0  # for members of a round that others have left
SAY_AFTER_S, SAY_EVERY_S = 1.0, 30.0


@dataclass
class Meeting:
    """One wait of one agent. Times are those of a monotonic clock, in seconds."""

    min_nodes: int
    max_nodes: int
    began: float
    _group: tuple[str, ...] = ()
    _unchanged_since: float = 0.0
    _leaving_since: float | None = None
    _said: str = ""
    _said_at: float = 0.0

    def group_to_propose(self, view: View, now: float) -> list[Entry] | None:
        """The group in the order of its ranks, if it is complete and this agent leads it."""
        if not view.is_fresh:
            self._group = ()
            return None
        going_on, leaving = decisions.busy(view.alive)
        if not leaving:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        waiting = [entry for entry in view.alive if entry.state == WAITING]
        group = decisions.best_group(waiting, self.max_nodes)
        ids = tuple(entry.id for entry in group)
        if ids != self._group:
            self._group, self._unchanged_since = ids, now
        is_awaited = self._leaving_since is not None and now - self._leaving_since < STRAGGLERS_S
        if going_on or is_awaited or group[0].id != view.me.id:
            return None
        is_complete = decisions.is_complete(
            group,
            self.min_nodes,
            self.max_nodes,
            unchanged_s=now - self._unchanged_since,
            gone=view.gone,
            first_call_s=FIRST_CALL_S,
            last_call_s=LAST_CALL_S,
        )
        return group if is_complete else None

    def line_to_say(self, view: View, now: float) -> str | None:
        """What a person should know: once when it changes, and again every SAY_EVERY_S."""
        if now - self.began < SAY_AFTER_S:
            return None
        line = decisions.describe_wait(view.me, view.alive, self.min_nodes, view.troubles)
        if line == self._said and now - self._said_at < SAY_EVERY_S:
            return None
        self._said, self._said_at = line, now
        return line
