"""Which agents an agent takes for alive, whom it promises what, and when it proposes which group."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.jobs import wait_until

from anynode import node as node_module
from anynode.decisions import FINISHED, LEFT, RUNNING, Entry, Round
from anynode.node import Meeting, Node, View

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


def silent(*_: object) -> dict[str, Any]:
    raise TimeoutError


def alive(node: Node) -> set[str]:
    return {entry.id for entry in node.view().alive} - {node.id}


def test_an_agent_whose_port_refuses_has_ended() -> None:
    runs, left, done = (other(state, state=state) for state in (RUNNING, LEFT, FINISHED))
    entries = [other("posts"), other("lies about"), runs, left, done]
    node = started(FakeBoard("board", lambda n: [dataclasses.replace(entries[0], counter=n), *entries[1:]]))
    wait_until(lambda: node.view().is_fresh)
    wait_until(lambda: {entry.id for entry in entries} <= node.view().gone)
    assert alive(node) == set() and node.view().ended == node.view().gone - {FINISHED}


def test_a_board_whose_copy_is_older_makes_nobody_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "request", silent)
    old = FakeBoard("old", lambda n: [other("dead", counter=3)])
    new = FakeBoard("new", lambda n: [other("dead", counter=9), other("lives", counter=n)])
    node = started(old, new)
    wait_until(lambda: old.exchanges > 5 and new.exchanges > 5)
    assert alive(node) == {"lives"}
    assert "127.0.0.1:1 does not answer" in node.view().troubles


@pytest.mark.parametrize("answers", [True, False])
def test_who_posts_no_more_is_gone_once_it_does_not_answer(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "request", (lambda *_: {"id": "a"}) if answers else silent)
    monkeypatch.setattr(node_module, "DEAD_S", 0.5)
    node = started(FakeBoard("board", lambda n: [other("a", counter=min(n, 4))]))
    wait_until(lambda: alive(node) == {"a"})
    wait_until(lambda: alive(node) == set())
    assert node.view().gone == (set() if answers else {"a"})


def test_who_sees_no_board_takes_nobody_for_gone_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_later(n: int) -> list[Entry]:
        if n > 4:
            raise PermissionError(13, "Permission denied")
        return [other("a", counter=n)]

    monkeypatch.setattr(node_module, "request", silent)
    monkeypatch.setattr(node_module, "FRESH_S", 0.5)
    node = started(FakeBoard("/shared/meet", fail_later))
    wait_until(lambda: alive(node) == {"a"})
    wait_until(lambda: not node.view().is_fresh)
    assert node.view().gone == frozenset()
    assert "/shared/meet: Permission denied" in node.view().troubles


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


def test_an_agent_promises_itself_to_one_leader_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_promise_lapses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "PROMISE_S", 0.05)
    node = Node("host", HERE, 1)
    node.wait_for_round()
    assert node.promise(proposal("a", "r1"))
    time.sleep(0.1)  # until the promise expires
    assert not node.enter(proposal("a", "r1"))
    assert node.promise(proposal("b", "r2")) and node.enter(proposal("b", "r2"))


def view(me: Entry, *others: Entry, gone: str = "", is_fresh: bool = True) -> View:
    return View(
        me, (me, *others), frozenset(gone), frozenset(), finished=False, is_fresh=is_fresh, troubles=()
    )


def entry(name: str, **fields: Any) -> Entry:
    return other(name, address=f"10.0.0.{ord(name) - 96}", reach=("a", "b", "c"), **fields)


def ids(group: list[Entry] | None) -> str | None:
    return "".join(member.id for member in group) if group else None


LAST = {"round": "r", "number": 1, "members": ("a", "b")}
A, B = entry("a"), entry("b")
LEFT_A, STUCK = entry("a", **LAST), entry("b", state=RUNNING, **LAST)
UNSEEN = view(A, is_fresh=False)


@pytest.mark.parametrize(
    ("max_nodes", "steps"),
    [
        (2, [(0.0, view(A, B), "ab")]),  # all agents are here
        (2, [(0.0, view(B, A), None)]),  # a leads
        (3, [(0.0, view(A), None), (4.9, view(A), None), (5.0, view(A), "a")]),
        (3, [(0.0, view(A), None), (5.0, view(A, B), None), (10.0, view(A, B), "ab")]),
        (3, [(0.0, view(A), None), (10.0, UNSEEN, None), (11.0, view(A), None), (16.0, view(A), "a")]),
        (
            3,
            [
                (0.0, view(LEFT_A, STUCK), None),
                (9.9, view(LEFT_A, STUCK), None),
                (10.0, view(LEFT_A, STUCK), "a"),
            ],
        ),
        (
            3,
            [(0.0, view(A, STUCK), None), (99.0, view(A, STUCK), None), (100.0, view(LEFT_A, gone="b"), "a")],
        ),
    ],
    ids=["all", "not the leader", "first call", "a newcomer", "no board", "a straggler", "a round goes on"],
)
def test_a_leader_proposes_a_complete_group(
    max_nodes: int, steps: list[tuple[float, View, str | None]]
) -> None:
    meeting = Meeting(1, max_nodes, began=0)
    for now, seen, group in steps:
        assert ids(meeting.group_to_propose(seen, now)) == group


def test_a_person_is_told_once_when_it_changes_and_now_and_then() -> None:
    a, b, meeting = entry("a"), entry("b"), Meeting(3, 3, began=0)
    lines = [meeting.line_to_say(view(a), now) for now in (0.5, 1.5, 2.0, 31.0, 32.0)]
    assert [line is not None for line in lines] == [False, True, False, False, True]
    assert str(meeting.line_to_say(view(a, b), 33.0)).startswith("waiting for more nodes, at least 3 in all")
    assert "no place to meet can be used" in str(meeting.line_to_say(UNSEEN, 34.0))
