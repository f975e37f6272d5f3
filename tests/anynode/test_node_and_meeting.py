"""Which agents an agent takes for alive, whom it promises what, and what it decides from entries."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.jobs import wait_until

from anynode import node as node_module
from anynode.decisions import (
    ENDED_HOLD_S,
    FINISHED,
    JOIN_HOLD_S,
    LAG_HOLD_S,
    LEFT,
    RUNNING,
    Entry,
    Pulse,
    Round,
    best_group,
    is_complete,
    job_of,
    must_restart,
)
from anynode.node import Node

HERE = "127.0.0.1"


def other(name: str, **fields: Any) -> Entry:
    values: dict[str, Any] = {"id": name, "host": f"host-{name}", "address": HERE, "port": 1}
    return Entry(**(values | fields))


class FakeBoard:
    """A board that answers an exchange with what `entries` returns for the number of the exchange."""

    def __init__(self, name: str, entries: Callable[[int], list[Entry]]) -> None:
        self.name, self._entries, self.exchanges = name, entries, 0

    def exchange(self, mine: Entry) -> list[Entry]:
        self.exchanges += 1
        return [mine, *self._entries(self.exchanges)]


def started(*boards: Any) -> Node:
    node = Node("host", HERE, 1)
    node.start(1, boards)
    return node


def alive(node: Node) -> set[str]:
    return {entry.id for entry in node.view().alive} - {node.id}


def test_an_agent_whose_port_refuses_has_ended() -> None:
    runs, left, done = (other(state, state=state) for state in (RUNNING, LEFT, FINISHED))
    entries = [other("posts"), other("lies about"), runs, left, done]
    node = started(FakeBoard("board", lambda n: [dataclasses.replace(entries[0], counter=n), *entries[1:]]))
    wait_until(lambda: node.view().is_fresh)
    wait_until(lambda: {entry.id for entry in entries} <= node.view().gone)
    assert alive(node) == set() and node.view().ended == node.view().gone - {FINISHED}


def test_a_board_that_hangs_keeps_no_agent_from_ending() -> None:
    def hang(n: int) -> list[Entry]:
        time.sleep(20)
        return []

    node = started(FakeBoard("board", hang))
    began = time.monotonic()
    node.end(LEFT, within_s=0.3)
    assert time.monotonic() - began < 5


def test_a_job_is_finished_only_for_whom_saw_it_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "request", lambda *_: {"id": "peer"})
    earlier = FakeBoard("b", lambda n: [other("peer", counter=n, state=FINISHED)])
    node = started(earlier)
    wait_until(lambda: earlier.exchanges > 5)
    assert not node.view().finished

    mine = FakeBoard("b", lambda n: [other("peer", counter=n, state=RUNNING if n < 4 else FINISHED)])
    node = started(mine)
    wait_until(lambda: node.view().finished)


@pytest.mark.parametrize(("job", "is_finished"), [("job", True), ("earlier", False), ("", False)])
def test_news_of_the_own_jobs_end_count_without_signs_of_life(job: str, is_finished: bool) -> None:
    left_by: Any = FakeBoard("b", lambda n: [other("ended", counter=9, state=FINISHED, job=job)])
    node = Node("host", HERE, 1)
    node.wait_for_round()
    assert node.promise(proposal(node.id)) and node.enter(proposal(node.id))
    node.wait_for_round()
    node.start(1, [left_by])
    wait_until(lambda: left_by.exchanges > 5)
    assert node.view().finished is is_finished


def proposal(leader: str, round: str = "r") -> Round:
    return Round(round, 4, "job", (other(leader), other("x")), store_port=1, job_store_port=2)


def test_an_agent_promises_itself_to_one_leader_at_a_time() -> None:
    node = Node("host", HERE, 1)
    node.wait_for_round()
    assert node.promise(proposal("a", "r1")) and node.promise(proposal("a", "r2"))
    assert not node.promise(proposal("b", "r3"))
    assert not node.enter(proposal("a", "r1")) and not node.enter(proposal("b", "r3"))
    assert node.entered is None
    assert node.enter(proposal("a", "r2"))
    entered = node.entered
    assert entered is not None and entered.id == "r2"
    assert not node.promise(proposal("a", "r4"))  # the agent runs
    node.wait_for_round()
    assert node.entered is None and node.promise(proposal("b", "r5"))


def entry(name: str, reach: str = "abcdef", **fields: object) -> Entry:
    """The entry of agent `name` ("a" to "f"), which by default reaches all the others."""
    number = ord(name) - ord("a") + 1
    values = {"host": f"node{number}", "address": f"10.0.0.{number}", "port": 29400, "reach": tuple(reach)}
    return Entry(id=name, **(values | fields))  # type: ignore[arg-type]


def running(name: str, round: str, members: str, number: int = 1, reach: str = "abcdef") -> Entry:
    return entry(name, reach, state=RUNNING, round=round, members=tuple(members), number=number)


def test_an_agent_is_alive_only_once_its_counter_changes() -> None:
    seen = Pulse(7, since=0.0)  # like a file that an earlier job left
    seen.observe(7, now=1.0)
    assert not seen.is_alive(1.0, 4.0)
    seen.observe(8, now=2.0)
    assert seen.is_alive(5.9, 4.0) and not seen.is_alive(6.0, 4.0)
    seen.observe(3, now=6.5)  # an older copy
    assert not seen.is_alive(6.5, 4.0)
    seen.observe(9, now=60.0)
    assert seen.is_alive(60.0, 4.0)


def names(group: list[Entry]) -> str:
    return "".join(member.id for member in group)


@pytest.mark.parametrize(
    ("reach", "group"),
    [
        ({"a": "bc", "b": "ac", "c": "ab"}, "abc"),
        ({"a": "", "b": "c", "c": "b"}, "bc"),  # a, the first leader, is cut off
        ({"a": "bc", "b": "c", "c": "b"}, "bc"),  # nobody reaches a: its own view does not suffice
        ({"a": "", "b": "ac", "c": "ab"}, "bc"),
        ({"a": "b", "b": "ac", "c": "b"}, "ab"),  # a and c do not reach each other: the larger key goes
        ({"a": "", "b": "", "c": ""}, "a"),
        ({"a": "bcd", "b": "acd", "c": "ab", "d": "ab"}, "abc"),
        ({"a": "d", "b": "cd", "c": "bd", "d": "abc"}, "bcd"),
        ({"a": "bcd", "b": "acd", "c": "abd", "d": "abc", "e": "a", "f": "e"}, "abcd"),
    ],
)
def test_the_group_is_of_agents_that_all_reach_each_other(reach: dict[str, str], group: str) -> None:
    entries = [entry(name, reached) for name, reached in reach.items()]
    assert names(best_group(entries, 9)) == group
    assert names(best_group(reversed(entries), 9)) == group  # all agents find the same group


def test_too_many_agents_leave_the_newcomer_as_a_spare() -> None:
    newcomer = entry("a")
    former = [entry(name, number=3, members=("b", "c"), round="r") for name in "bc"]
    assert names(best_group([newcomer, *former], 2)) == "bc"
    assert names(best_group([newcomer, *former], 3)) == "abc"


def complete(group: list[Entry], unchanged_s: float, gone: str = "") -> bool:
    return is_complete(group, 2, 3, unchanged_s, set(gone))


def test_a_first_round_waits_for_others_unless_all_are_here() -> None:
    two = [entry("a"), entry("b")]
    assert not complete(two[:1], 100)
    assert not complete(two, 4.9) and complete(two, 5.0)
    assert complete([*two, entry("c")], 0.0)


def test_a_later_round_starts_once_each_former_member_is_here_or_gone() -> None:
    group = [entry(name, number=2, members=("a", "b", "c")) for name in "ab"]
    assert not complete(group, 0.0) and not complete(group, 1.4) and complete(group, 1.5)
    assert complete(group, 0.0, gone="c")
    assert not complete(group[:1], 100, gone="bc")
    late = [group[0], entry("d")]  # a knows the last round, d is a new agent
    assert complete(late, 0.0, gone="bc") and not complete(late, 0.0, gone="b")


def test_the_job_and_its_number_come_from_whoever_went_furthest() -> None:
    assert job_of([entry("a"), entry("b")]) == (0, "")
    assert job_of([entry("a", job="new", number=1), entry("b", job="old", number=7)]) == (7, "old")


A, B = running("a", "r", "ab"), running("b", "r", "ab")
LATER = entry("b", round="r", number=2)


@pytest.mark.parametrize(
    ("others", "ended", "reason", "hold_s"),
    [
        ([B], "", None, None),
        ([], "", None, None),  # workers notice a dead peer by themselves
        ([entry("b", state=FINISHED, round="r")], "", None, None),
        ([B], "c", None, None),  # a stranger has ended
        ([B], "b", "the agent of a member has ended", ENDED_HOLD_S),  # its workers may live on
        ([LATER], "", "node2 (10.0.0.2) is not in the round", 0.0),
        ([running("b", "r3", "bc", number=3)], "", "node2 (10.0.0.2) is not in the round", 0.0),
        ([running("b", "r1", "ab", number=0)], "", "node2 (10.0.0.2) is not in the round", LAG_HOLD_S),
        ([entry("b")], "", "node2 (10.0.0.2) is not in the round", LAG_HOLD_S),  # still seen as before
        ([B, entry("c")], "", "node3 (10.0.0.3) joins", JOIN_HOLD_S),
        ([entry("c", "a")], "", "node3 (10.0.0.3) joins", JOIN_HOLD_S),  # b is dead
        ([B, entry("c", state=FINISHED)], "", None, None),
        ([B, entry("c", "a")], "", None, None),  # b does not reach the newcomer
        ([B, entry("c", "b")], "", None, None),
        ([running("b", "r", "ab", reach="a"), entry("c", "ab")], "", None, None),
        ([running("c", "s", "cd"), running("d", "s", "cd")], "", "go on as a larger group", JOIN_HOLD_S),
        ([B, running("c", "s", "cd"), running("d", "s", "cd")], "", None, None),  # of one size: the first id
        ([B, running("c", "p", "cd"), running("d", "p", "cd")], "", "go on as a larger group", JOIN_HOLD_S),
    ],
)
def test_a_round_ends_for_what_its_workers_cannot_see(
    others: list[Entry], ended: str, reason: str | None, hold_s: float | None
) -> None:
    found = must_restart(A, [A, *others], 3, ended)
    assert (found.hold_s if found else None) == hold_s
    assert found is None or (reason and reason in found.reason)
    if reason and "joins" in reason:
        assert must_restart(A, [A, *others], 2, ended) is None  # there is no room
