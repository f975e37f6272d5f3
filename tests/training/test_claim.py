import dataclasses
import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.needs import need_proc

from mingpt.base.errors import LaterGeneration, SupersededError, UserError
from mingpt.base.processes import Process, this_process
from mingpt.training import claim as claim_module
from mingpt.training.claim import Claim, Holder, read_newest


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that stand for the agents of jobs."""
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "LEASE_S", 1.5)


def claim(folder: Path, *agents: Process | subprocess.Popen[bytes], job: str = "") -> Claim:
    """The claim, not yet acquired, of a generation with these agents; without `job` it is a new job."""
    processes = tuple(one if isinstance(one, Process) else this_process(one.pid) for one in agents)
    holder = Holder(processes, job or uuid.uuid4().hex, uuid.uuid4().hex, time.time())
    return Claim(folder, holder)


def elsewhere(name: str) -> Process:
    """The agent of a job on another machine; this machine cannot tell whether it is alive."""
    return Process(name, f"another machine, {name}", 4242, "17")


def test_a_second_job_is_refused_with_host_process_and_time_of_the_first(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    first = claim(tmp_path, agents[0])
    first.acquire()
    with pytest.raises(UserError) as refusal:
        claim(tmp_path, agents[1]).acquire()
    for part in (f"process {agents[0].pid} on host {this_process().host}, since 20", f"run_dir {tmp_path}"):
        assert part in str(refusal.value)
    assert str(refusal.value).endswith(f"remove its claim {tmp_path}/claim-000001.json")
    first.check()


def test_a_killed_job_is_succeeded_at_once(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "LEASE_S", 60.0)
    first = claim(tmp_path, agents[0])
    first.acquire()
    need_proc()
    agents[0].kill()  # the process stays a zombie, since its parent has not waited for it
    began = time.monotonic()
    while first.holder.is_alive():
        assert time.monotonic() < began + 10
    claim(tmp_path, agents[1]).acquire()
    assert time.monotonic() - began < 10


def test_without_proc_a_holder_lives_as_long_as_its_process(
    agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac: host name and process id are all that is known."""

    def read_nothing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_nothing)
    agent = this_process(agents[0].pid)
    assert agent.start_time is None and agent.machine == agent.host and agent.is_alive()
    agents[0].kill()
    agents[0].wait()
    assert agent.is_alive() is False


def test_a_job_that_has_ended_makes_way_and_none_of_its_generations_takes_the_next_claim_for_its_own(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    earlier, later, next_job = (claim(tmp_path, agents[number]) for number in (0, 0, 1))
    earlier.acquire()
    later.acquire()
    later.release()
    with pytest.raises(SupersededError, match="its claim was removed"):
        earlier.check()
    next_job.acquire()
    assert next_job.number == earlier.number + 1
    next_job.check()
    assert next_job.may_write() and not earlier.may_write()
    with pytest.raises(SupersededError, match=f"process {agents[1].pid} on host"):
        earlier.check()
    earlier.renew()
    earlier.release()  # `renew` and `release` change nothing
    next_job.check()


def test_a_process_that_was_suspended_for_as_long_as_a_whole_job_ousts_nobody(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    """It was about to succeed a dead holder."""
    claim(tmp_path, dataclasses.replace(this_process(), start_time="1")).acquire()
    found = read_newest(tmp_path)
    suspended, whole, live = (claim(tmp_path, agent) for agent in agents)
    whole.acquire()
    whole.release()
    live.acquire()
    suspended.take(found)
    live.check()
    assert [path.name for path in tmp_path.iterdir()] == ["claim-000003.json"]


def test_a_later_generation_of_a_job_takes_over_and_the_earlier_one_notices(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    """The generations share one agent; another agent was replaced."""
    earlier, later = claim(tmp_path, agents[0], agents[1]), claim(tmp_path, agents[2], agents[1])
    earlier.acquire()
    later.acquire()
    later.check()
    with pytest.raises(LaterGeneration, match="the job goes on without this worker"):
        earlier.check()
    assert (later.holder.job, later.holder.since) == (earlier.holder.job, earlier.holder.since)
    earlier.release()  # changes nothing
    later.check()
    with pytest.raises(UserError):
        claim(tmp_path, agents[0]).acquire()


def test_of_two_parts_of_a_job_one_goes_on_and_the_other_waits_until_it_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher gives both the job's token. They share no agent; neither sees whether the other lives."""
    first, second = (claim(tmp_path, elsewhere(node), job="abc") for node in ("node1", "node2"))
    first.acquire()
    timer = threading.Timer(0.7, first.renew)
    timer.start()
    began = time.monotonic()
    second.acquire()
    assert time.monotonic() - began >= 0.7 + 1.5, "the first one goes on while it is renewed"
    (line,) = capsys.readouterr().err.splitlines()
    assert "is claimed by job abc" in line
    with pytest.raises(LaterGeneration):
        first.check()


def test_a_holder_on_another_machine_that_renews_its_claim_is_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "LEASE_S", 60.0)
    first = claim(tmp_path, elsewhere("node1"))
    first.acquire()
    timer = threading.Timer(0.7, first.renew)
    timer.start()
    began = time.monotonic()
    with pytest.raises(UserError, match="process 4242 on host node1"):
        claim(tmp_path, elsewhere("node2")).acquire()
    assert time.monotonic() - began < 30
    (line,) = capsys.readouterr().err.splitlines()
    assert "node1" in line and "waiting until it has not renewed its claim for 60 s" in line
    timer.join()


def test_a_claim_is_renewed_where_times_cannot_be_set_and_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = claim(tmp_path, elsewhere("node1"))
    own.acquire()
    os.utime(own.path(1), (0, 0))
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError))
    own.renew()
    assert own.path(1).stat().st_mtime > 0 and claim_module.read_newest(tmp_path).holder == own.holder
    monkeypatch.setattr("builtins.open", Mock(side_effect=OSError(errno.ENOTCONN, "away")))
    monkeypatch.setattr(own, "may_write", lambda: True)
    own.renew()
    own.renew()
    (line,) = caplog.messages
    assert "cannot be renewed (away): a job on another host may take the folder over" in line


def test_a_holder_on_another_machine_that_does_not_renew_loses_its_claim(tmp_path: Path) -> None:
    first, second = claim(tmp_path, elsewhere("node1")), claim(tmp_path, elsewhere("node2"))
    began = time.monotonic()
    first.acquire()
    second.acquire()
    assert 1.5 <= time.monotonic() - began < 10
    with pytest.raises(SupersededError, match="node2"):
        first.check()


@pytest.mark.parametrize(
    ("number", "content", "size"),
    [(3, b"", 0), (999_999, b'{"agents": [1], "job": "a", "generation": "b"}', 46), (10**7, b"", 10**12)],
)
def test_a_damaged_claim_is_somebodys_until_the_lease_ends(
    number: int, content: bytes, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"claim-{number:06d}.json"
    path.write_bytes(content)
    os.truncate(path, size)
    own = claim(tmp_path, elsewhere("node1"))
    own.acquire()
    assert own.number == number + 1 and "an unknown process" in capsys.readouterr().err
    own.release()
    assert path.exists() == (size > 0)  # it may be a user's, unless it was being written


def test_on_a_full_disk_the_next_generation_goes_on_with_the_claim_there_is(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for no other file, and a file that was created stays empty."""
    claim(tmp_path, agents[0]).acquire()

    def open_without_room(path: Path, mode: str) -> Any:
        file: Any = open(path, mode)  # noqa: SIM115
        if "x" in mode:
            file.write = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        return file

    monkeypatch.setattr(claim_module, "open", open_without_room, raising=False)
    later = claim(tmp_path, agents[0])
    later.acquire()
    later.check()
    agents[0].kill()
    agents[0].wait()
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path, agents[1]).acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["claim-000001.json"]


def compete(folder: Path, start: Barrier, results: Any) -> None:
    """Try to claim, in a process that stays alive until all have tried."""
    own = claim(folder, this_process())
    start.wait()
    try:
        own.acquire()
        results.put("held")
    except UserError:
        results.put("refused")
    start.wait()


@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.parametrize("before", ["nothing", "a dead holder"])
def test_of_jobs_that_claim_at_the_same_time_exactly_one_succeeds(
    attempt: int, before: str, tmp_path: Path
) -> None:
    if before == "a dead holder":
        claim(tmp_path, dataclasses.replace(this_process(), start_time="1")).acquire()
    processes = multiprocessing.get_context("fork")
    start, results = processes.Barrier(4), processes.Queue()
    jobs = [processes.Process(target=compete, args=(tmp_path, start, results)) for _ in range(4)]
    for job in jobs:
        job.start()
    outcomes = sorted(results.get(timeout=60) for _ in jobs)
    for job in jobs:
        job.join()
    assert outcomes == ["held", "refused", "refused", "refused"]
    assert [path.name for path in tmp_path.iterdir()] == [f"claim-{1 if before == 'nothing' else 2:06d}.json"]
