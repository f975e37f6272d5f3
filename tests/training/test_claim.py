import dataclasses
import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from mingpt.base.errors import LaterGeneration, SupersededError, UserError
from mingpt.snapshot import Process, this_process
from mingpt.training.claim import Claim, Holder, parse_holder


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that stand for the agents of jobs."""
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def holder_of(process: subprocess.Popen[bytes], **fields: Any) -> Holder:
    return Holder((this_process(process.pid),), **fields)


def elsewhere(name: str = "node7", **fields: Any) -> Holder:
    """A job on another machine, of which nobody here sees whether it lives."""
    return Holder((Process(name, f"another machine, {name}", 4242, "17"),), **fields)


@pytest.fixture(params=["folder", "object store"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "folder" else f"memory://claims-{uuid.uuid4().hex}"


def claim(url: str, lease_s: float = 1.5) -> Claim:
    return Claim(url, f"run_dir {url}", lease_s)


def test_a_second_job_is_refused_with_host_process_and_time_of_the_first(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    first = claim(url)
    first.acquire(holder_of(agents[0]))
    with pytest.raises(UserError) as refusal:
        claim(url).acquire(holder_of(agents[1]))
    host = this_process().host
    for part in (f"process {agents[0].pid} on host {host}", "since 20", "--release", f"run_dir {url}"):
        assert part in str(refusal.value)
    first.check()


def test_a_killed_job_is_succeeded_at_once(url: str, agents: list[subprocess.Popen[bytes]]) -> None:
    claim(url, lease_s=60).acquire(holder_of(agents[0]))
    agents[0].kill()  # it stays a zombie: nobody has waited for it
    began = time.monotonic()
    while holder_of(agents[0]).is_alive():
        assert time.monotonic() < began + 10
    claim(url, lease_s=60).acquire(holder_of(agents[1]))
    assert time.monotonic() - began < 10


def test_a_later_process_with_the_same_id_is_not_the_holder(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    reused = dataclasses.replace(this_process(agents[0].pid), start_time="1")
    claim(url, lease_s=60).acquire(Holder((reused,)))
    claim(url, lease_s=60).acquire(holder_of(agents[1]))


def test_a_job_that_has_ended_makes_way(url: str, agents: list[subprocess.Popen[bytes]]) -> None:
    first = claim(url)
    first.acquire(holder_of(agents[0]))
    first.release()
    second = claim(url)
    second.acquire(holder_of(agents[1]))
    second.check()


def test_an_earlier_generation_never_takes_a_later_claim_for_its_own(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    earlier, later = claim(url), claim(url)
    earlier.acquire(holder_of(agents[0]))
    later.acquire(holder_of(agents[0]))
    later.release()
    with pytest.raises(SupersededError):
        earlier.check()
    claim(url).acquire(holder_of(agents[1]))
    with pytest.raises(SupersededError):
        earlier.check()


def test_another_job_in_a_folder_that_was_removed_and_made_again_is_noticed(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    first, second = claim(str(tmp_path / "run")), claim(str(tmp_path / "run"))
    first.acquire(holder_of(agents[0]))
    shutil.rmtree(tmp_path / "run")
    second.acquire(holder_of(agents[1]))
    assert first.number == second.number
    with pytest.raises(SupersededError, match=f"process {agents[1].pid} on host"):
        first.check()
    first.release()
    second.check()


def test_a_later_generation_of_a_job_takes_over_and_the_earlier_one_notices(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    """They share an agent; another one was replaced."""
    earlier, later = claim(url), claim(url)
    earlier.acquire(Holder((this_process(agents[0].pid), this_process(agents[1].pid))))
    later.acquire(Holder((this_process(agents[2].pid), this_process(agents[1].pid))))
    later.check()
    with pytest.raises(LaterGeneration, match="the job goes on without this worker"):
        earlier.check()
    assert later.holder and earlier.holder
    assert (later.holder.job, later.holder.since) == (earlier.holder.job, earlier.holder.since)
    earlier.renew()
    earlier.release()  # neither changes anything
    later.check()
    with pytest.raises(UserError):
        claim(url).acquire(holder_of(agents[0]))


def test_a_generation_knows_that_an_earlier_one_of_its_job_had_begun(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    first, second, third = claim(url), claim(url), claim(url)
    first.acquire(holder_of(agents[0]))
    second.acquire(holder_of(agents[0]))
    assert not second.was_started
    second.mark_started()
    second.check()
    third.acquire(holder_of(agents[0]))
    assert third.was_started
    third.release()
    another = claim(url)
    another.acquire(holder_of(agents[1]))
    assert not another.was_started


def test_of_two_parts_of_a_job_one_goes_on_and_the_other_waits_until_it_is_gone(url: str) -> None:
    """The launcher gives the token; the parts share no agent, and neither sees whether the other lives."""
    first, second, together = claim(url), claim(url), claim(url)
    first.acquire(elsewhere("node1", job="abc"))
    waits: list[str] = []
    waiting = threading.Thread(
        target=lambda: second.acquire(elsewhere("node2", job="abc"), waits.append), daemon=True
    )
    waiting.start()
    deadline = time.monotonic() + 2 * first.lease_s
    while time.monotonic() < deadline:
        first.renew()
        time.sleep(0.3)
    assert waiting.is_alive() and second.number == 0
    assert len(waits) == 1 and "another part of this job goes on in run_dir" in waits[0]
    first.check()
    waiting.join(timeout=4 * first.lease_s)
    assert not waiting.is_alive() and second.number
    with pytest.raises(LaterGeneration):
        first.check()
    agents_of_both = (*elsewhere("node1").agents, *elsewhere("node2").agents)
    together.acquire(Holder(agents_of_both, job="abc"), waits.append)
    assert len(waits) == 1, "a generation of both takes over at once"


def test_a_requeued_job_takes_over_and_another_step_of_the_same_slurm_job_does_not(url: str) -> None:
    claim(url).acquire(elsewhere("node1", slurm_job="77"))
    waits: list[str] = []
    second = claim(url, lease_s=60)
    second.acquire(elsewhere("node2", slurm_job="77", slurm_restarts=1), waits.append)
    assert waits == []
    third = claim(url, lease_s=0.2)
    third.acquire(elsewhere("node3", slurm_job="77", slurm_restarts=1), waits.append)
    assert len(waits) == 1


def test_a_holder_on_another_machine_that_renews_its_claim_is_alive(url: str) -> None:
    first = claim(url)
    first.acquire(elsewhere("node1"))
    timer = threading.Timer(0.7, first.renew)
    timer.start()
    waits: list[str] = []
    began = time.monotonic()
    with pytest.raises(UserError, match="process 4242 on host node1"):
        claim(url, lease_s=60).acquire(elsewhere("node2"), waits.append)
    assert time.monotonic() - began < 30
    assert len(waits) == 1 and "node1" in waits[0] and "for it to be renewed" in waits[0]
    timer.join()


def test_a_holder_on_another_machine_that_does_not_renew_loses_its_claim_after_the_lease(url: str) -> None:
    first, second = claim(url), claim(url, lease_s=1.5)
    began = time.monotonic()
    first.acquire(elsewhere("node1"))
    second.acquire(elsewhere("node2"))
    assert 1.5 <= time.monotonic() - began < 10
    with pytest.raises(SupersededError, match="node2"):
        first.check()


def test_a_dropped_claim_is_free_and_its_holder_notices(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    first, second = claim(url), claim(url)
    first.acquire(holder_of(agents[0]))
    claim(url).drop()
    with pytest.raises(SupersededError):
        first.check()
    second.acquire(holder_of(agents[1]))
    second.check()


def test_a_claim_that_was_not_renewed_for_longer_than_the_lease_has_ended(tmp_path: Path) -> None:
    first, second = claim(str(tmp_path)), claim(str(tmp_path), lease_s=60)
    first.acquire(elsewhere("node1"))
    os.utime(first.path(1), (time.time() - 61, time.time() - 61))
    waits: list[str] = []
    second.acquire(elsewhere("node2"), waits.append)
    second.check()
    assert waits == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 100_000, b'{"agents": [1], "job": "a", "nonce": "b"}', b"\xff"]
)
def test_a_damaged_claim_is_somebodys_until_the_lease_ends(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "claim-000003.json").write_bytes(content)
    assert parse_holder(content).agents == ()
    waits: list[str] = []
    own = claim(str(tmp_path), lease_s=0.2)
    own.acquire(elsewhere(), waits.append)
    assert own.number == 4 and len(waits) == 1 and "an unknown process" in waits[0]


def test_on_a_full_disk_the_next_generation_goes_on_with_the_claim_there_is(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    claim(str(tmp_path)).acquire(holder_of(agents[0]))
    later = claim(str(tmp_path))
    monkeypatch.setattr(later, "create_file", full)
    later.acquire(holder_of(agents[0]))
    later.check()
    agents[0].kill()
    agents[0].wait()
    another = claim(str(tmp_path))
    monkeypatch.setattr(another, "create_file", full)
    with pytest.raises(OSError, match="No space left"):
        another.acquire(holder_of(agents[1]))


def compete(url: str, start: Barrier, results: Any) -> None:
    """In a process: try to claim, and stay alive until all have tried."""
    own = claim(url)
    start.wait()
    try:
        own.acquire(Holder((this_process(),)))
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
        claim(str(tmp_path)).acquire(Holder((dataclasses.replace(this_process(), start_time="1"),)))
    processes = multiprocessing.get_context("fork")
    start, results = processes.Barrier(4), processes.Queue()
    jobs = [processes.Process(target=compete, args=(str(tmp_path), start, results)) for _ in range(4)]
    for job in jobs:
        job.start()
    outcomes = sorted(results.get(timeout=60) for _ in jobs)
    for job in jobs:
        job.join()
    assert outcomes == ["held", "refused", "refused", "refused"]
    assert [path.name for path in tmp_path.iterdir()] == [f"claim-{1 if before == 'nothing' else 2:06d}.json"]
