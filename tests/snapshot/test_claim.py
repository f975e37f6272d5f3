"""One job at a time may write to a run folder, whichever processes ask for it, and when."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import need_proc, wait_until
from support.properties import examples

from mingpt.base.errors import LaterGeneration, SupersededError, UserError
from mingpt.base.processes import Process, this_process
from mingpt.snapshot import claim as claim_module
from mingpt.snapshot.claim import LEASE_S, Claim, Holder, read_newest

DEAD = replace(this_process(), start_time="1")
Agents = list[subprocess.Popen[bytes]]


class Clock:
    """In the place of the module `time`. Time passes only in `sleep`, which calls `events`, {when: what}."""

    strftime, localtime = time.strftime, time.localtime

    def __init__(self) -> None:
        self.now, self.events = 0.0, dict[float, Callable[[], None]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.events if when <= self.now]:
            self.events.pop(when)()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(claim_module, "time", clock)
    monkeypatch.setattr(Claim, "keep_renewing", Mock())
    return clock


@pytest.fixture
def agents() -> Iterator[Agents]:
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def claim(folder: Path, *agents: Process | subprocess.Popen[bytes], job: str = "") -> Claim:
    """The claim, not yet acquired, of a generation with these agents; without `job` it is a new job."""
    processes = tuple(one if isinstance(one, Process) else this_process(one.pid) for one in agents)
    return Claim(folder, Holder(processes, job or uuid.uuid4().hex, uuid.uuid4().hex, time.time()))


def elsewhere(name: str) -> Process:
    """The agent of a job on another machine; this machine cannot tell whether it is alive."""
    return Process(name, f"another machine, {name}", 4242, "17")


@examples(300)
@given(
    before=st.sampled_from(["nothing", "a job that was killed", "a job that has ended"]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["look", "take", "end"])), max_size=30),
)
def test_in_whatever_order_jobs_look_and_take_and_end_at_most_one_holds_the_folder(
    before: str, steps: list[tuple[int, str]]
) -> None:
    """Between look and take, a job may be suspended for as long as the whole of another."""
    with tempfile.TemporaryDirectory() as name:
        if before != "nothing":
            earlier = claim(Path(name), DEAD)
            earlier.take(read_newest(Path(name)))
            if before == "a job that has ended":
                earlier.release()
        jobs = [claim(Path(name), elsewhere(f"node{number}")) for number in range(3)]
        seen = [read_newest(Path(name))] * 3
        for number, step in steps:
            if step == "look":
                seen[number] = read_newest(Path(name))
            elif step == "end":
                jobs[number].release()
            elif not jobs[number].number and jobs[number].may_take(seen[number]):
                jobs[number].take(seen[number])
            holders = [job for job in jobs if job.number]
            assert len(holders) <= 1 and all(job.may_write() for job in holders)
        assert len(os.listdir(name)) <= 1


def test_a_killed_job_is_succeeded_at_once(tmp_path: Path, agents: Agents, clock: Clock) -> None:
    """A zombie has ended."""
    need_proc()
    first = claim(tmp_path, agents[0])
    first.acquire()
    assert first.holder.is_alive()
    agents[0].kill()
    os.waitid(os.P_PID, agents[0].pid, os.WEXITED | os.WNOWAIT)
    claim(tmp_path, agents[1]).acquire()
    assert clock.now == 0.0


def test_a_later_generation_takes_over_and_a_job_that_has_ended_makes_way(
    tmp_path: Path, agents: Agents, clock: Clock
) -> None:
    """The generations share one agent; another agent was replaced. A job is refused at once meanwhile."""
    earlier, later, other = claim(tmp_path, *agents[:2]), claim(tmp_path, *agents[1:]), claim(tmp_path)
    earlier.acquire()
    later.acquire()
    with pytest.raises(LaterGeneration, match="the job goes on without this worker"):
        earlier.check()
    assert (later.holder.job, later.holder.since) == (earlier.holder.job, earlier.holder.since)
    with pytest.raises(UserError, match=f"process {agents[1].pid} on host {this_process().host}"):
        other.acquire()
    later.check()
    later.release()
    with pytest.raises(SupersededError, match="its claim was removed"):
        earlier.check()
    other.acquire()
    with pytest.raises(SupersededError, match=r"an unknown process, .* has taken over"):
        earlier.check()
    earlier.renew()
    earlier.release()
    other.check()
    assert (other.number, clock.now) == (2, 0.0)


@pytest.mark.parametrize(
    ("jobs", "renewals", "waits_s", "lost"),
    [
        ("ab", 1, 0.7, None),  # it is alive
        ("ab", 0, LEASE_S, SupersededError),
        ("aa", 1, 0.7 + LEASE_S, LaterGeneration),  # two parts of a job, which the network has split
    ],
    ids=["another job that goes on", "one that is gone", "the same job"],
)
def test_a_holder_on_another_machine_is_waited_for_while_it_renews_its_claim(
    jobs: str, renewals: int, waits_s: float, lost: type[Exception] | None, tmp_path: Path, clock: Clock
) -> None:
    first, second = (claim(tmp_path, elsewhere(f"node{n}"), job=job) for n, job in enumerate(jobs))
    first.acquire()
    os.utime(first.path(1), (0, 0))
    clock.events = dict.fromkeys([0.7] * renewals, first.renew)
    with contextlib.nullcontext() if lost else pytest.raises(UserError):
        second.acquire()
    assert waits_s <= clock.now < waits_s + 2
    with pytest.raises(lost) if lost else contextlib.nullcontext():
        first.check()


def test_a_claim_is_renewed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # time passes
    monkeypatch.setattr(claim_module, "RENEW_S", 0.01)
    own = claim(tmp_path, elsewhere("node1"))
    own.acquire()
    for _ in range(2):
        os.utime(own.path(1), (0, 0))
        wait_until(lambda: own.path(1).stat().st_mtime)
    own.number = 0


@pytest.mark.parametrize(
    ("number", "content", "size"),
    [(3, b"", 0), (999_999, b'{"agents": [1], "job": "a", "generation": "b"}', 46), (10**7, b"", 10**12)],
)
def test_a_damaged_claim_is_somebodys_until_the_lease_ends(
    number: int, content: bytes, size: int, tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / f"claim-{number:06d}.json"
    path.write_bytes(content)
    os.truncate(path, size)
    own = claim(tmp_path, elsewhere("node1"))
    own.acquire()
    assert own.number == number + 1 and clock.now >= LEASE_S
    own.release()
    assert path.exists() == (size > 0)  # it may be a user's, unless it was being written


def test_a_folder_that_is_gone_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "gone", DEAD).acquire()
