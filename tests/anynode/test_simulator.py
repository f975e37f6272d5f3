"""The promises of anynode in simulated schedules, and whether the simulator finds faults of the protocol."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import simulator
from simulator import try_seeds

from anynode import decisions, node
from anynode.decisions import WAITING, Entry, Restart
from anynode.node import Node, View

SEEDS = range(1, 61)
MANY = 10_000


def test_drawn_schedules_keep_the_promises() -> None:
    failed = [(seed, why) for seed, _, why in try_seeds(SEEDS) if why]
    assert failed == []


def without(reason: str) -> Callable[..., Restart | None]:
    """The function `must_restart` that never gives this reason."""
    whole = decisions.must_restart

    def must_restart(
        me: Entry, alive: Collection[Entry], max_nodes: int, ended: Collection[str] = ()
    ) -> Restart | None:
        found = whole(me, alive, max_nodes, ended)
        return None if found and reason in found.reason else found

    return must_restart


def whoever(entries: Sequence[Entry], max_nodes: int) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.key)[:max_nodes]


class Forgetful(Node):
    """A node for which an agent that it had forgotten was neither here nor gone, until 2026-11-29."""

    def view(self) -> View:
        seen = super().view()
        return dataclasses.replace(seen, ended=seen.ended & self._peers.keys())


class LateWitness(Forgetful):
    """A forgetful node for which an agent that died before it was seen running had not ended."""

    def view(self) -> View:
        seen = super().view()
        waited = {id for id in seen.ended if self._peers[id].entry.state == WAITING}
        return dataclasses.replace(seen, ended=seen.ended - waited)


@pytest.mark.parametrize(
    ("module", "name", "fault", "seeds"),
    [
        (decisions, "must_restart", without("joins"), range(1, 20)),
        (decisions, "must_restart", without("larger group"), range(80, 90)),
        (decisions, "must_restart", without("agent of a member has ended"), range(1, 20)),
        (decisions, "best_group", whoever, range(880, 890)),
        (decisions, "busy", lambda alive: ([], []), range(30, 40)),
        (node, "PROMISE_S", 1e9, range(20, 40)),
        (simulator, "Node", LateWitness, range(530, 540)),
        (simulator, "Node", Forgetful, range(2117, 2118)),
    ],
    ids=["joins", "larger group", "ended agent", "links", "busy", "promise", "late witness", "forgetful"],
)
def test_a_fault_in_the_protocol_breaks_a_promise(
    module: Any, name: str, fault: Any, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert any(why for _, _, why in try_seeds(seeds))


@pytest.mark.weekly
def test_ten_thousand_schedules_keep_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulator.py", "--schedules", str(MANY), "--first_seed", "100001"])
    assert simulator.main() == 0
