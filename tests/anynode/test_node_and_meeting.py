"""Which agents an agent takes for alive, and whom it promises what; simulator.py draws the rest."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.jobs import wait_until

from anynode import node as node_module
from anynode.decisions import FINISHED, LEFT, RUNNING, Entry, Round
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
