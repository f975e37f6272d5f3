"""Who is in the group and who has to restart, decided on plain entries."""

import pytest

from anynode.decisions import (
    ENDED_HOLD_S,
    FINISHED,
    JOIN_HOLD_S,
    LAG_HOLD_S,
    RUNNING,
    Entry,
    Pulse,
    best_group,
    describe_wait,
    is_complete,
    job_of,
    must_restart,
)


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


def test_ranks_follow_addresses_as_numbers_then_names() -> None:
    ten, nine = entry("a", address="10.0.0.10"), entry("b", address="10.0.0.9")
    named, ipv6 = entry("c", address="gpu7"), entry("d", address="fd00::1")
    assert names(best_group([named, ten, nine], 9)) == "bac"
    assert names(best_group([named, ipv6, ten], 9)) == "adc"


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


def test_a_round_of_which_all_are_here_goes_on() -> None:
    a, b = running("a", "r", "ab"), running("b", "r", "ab")
    assert must_restart(a, [a, b], 3) is None
    assert must_restart(a, [a], 3) is None  # workers notice a dead peer by themselves
    assert must_restart(a, [a, entry("b", state=FINISHED, round="r")], 3) is None


def test_a_member_whose_agent_was_killed_ends_the_round_though_its_workers_live_on() -> None:
    a, b = running("a", "r", "ab"), running("b", "r", "ab")
    found = must_restart(a, [a, b], 3, ["b"])
    assert found is not None and found.hold_s == ENDED_HOLD_S
    assert must_restart(a, [a, b], 3, ["c"]) is None  # a stranger


@pytest.mark.parametrize(
    ("member", "hold_s"),
    [
        (entry("b", round="r", number=2), 0.0),
        (running("b", "r3", "bc", number=3), 0.0),
        (entry("b", round="r1", number=1), LAG_HOLD_S),  # b is still seen in its old round
        (running("b", "r1", "ab", number=1), LAG_HOLD_S),
        (entry("b"), LAG_HOLD_S),
    ],
)
def test_a_member_that_left_or_went_on_alone_ends_the_round(member: Entry, hold_s: float) -> None:
    a = running("a", "r", "ab", number=2)
    found = must_restart(a, [a, member], 3)
    assert found is not None and found.hold_s == hold_s and "node2 (10.0.0.2)" in found.reason


def test_a_newcomer_that_all_members_reach_is_taken_in() -> None:
    a, b = running("a", "r", "ab"), running("b", "r", "ab")
    for me in (a, b):
        found = must_restart(me, [a, b, entry("c")], 3)
        assert found is not None and found.hold_s == JOIN_HOLD_S and "node3 (10.0.0.3) joins" in found.reason
    assert must_restart(a, [a, entry("c", "a")], 3) is not None  # b is dead
    assert must_restart(a, [a, b, entry("c")], 2) is None  # there is no room
    assert must_restart(a, [a, b, entry("c", state=FINISHED)], 3) is None


@pytest.mark.parametrize("reach", ["a", "b", ""])
def test_a_newcomer_that_only_some_reach_disturbs_nobody(reach: str) -> None:
    a, b = running("a", "r", "ab"), running("b", "r", "ab")
    for me in (a, b):
        assert must_restart(me, [a, b, entry("c", reach)], 3) is None
    deaf = running("b", "r", "ab", reach="a")
    for me in (a, deaf):
        assert must_restart(me, [a, deaf, entry("c", "ab")], 3) is None


def test_of_two_rounds_the_larger_goes_on_and_of_one_size_exactly_one() -> None:
    a, b, c = running("a", "r1", "a"), running("b", "r2", "bc"), running("c", "r2", "bc")
    found = must_restart(a, [a, b, c], 3)
    assert found is not None and found.hold_s == JOIN_HOLD_S and "larger group" in found.reason
    assert must_restart(b, [a, b, c], 3) is None and must_restart(c, [a, b, c], 3) is None
    alone = running("b", "r2", "b")
    assert must_restart(a, [a, alone], 3) is None and must_restart(alone, [a, alone], 3) is not None


def test_who_waits_says_for_whom() -> None:
    a, others = entry("a"), [running("b", "r", "bc"), running("c", "r", "bc")]
    assert describe_wait(a, [a], 3, ["10.0.0.2:29400 does not answer"]) == (
        "waiting for more nodes, at least 3 in all: here node1 (10.0.0.1); 10.0.0.2:29400 does not answer"
    )
    assert describe_wait(a, [a, *others], 1, []) == (
        "waiting to join node2 (10.0.0.2), node3 (10.0.0.3): here node1 (10.0.0.1)"
    )
    late = entry("c", round="r")
    assert describe_wait(late, [others[0], late], 1, []).startswith(
        "waiting for node2 (10.0.0.2) to end the round"
    )
