import dataclasses
import errno
import multiprocessing
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SMALL
from support.needs import need_proc
from support.ranks import run_ranks

from mingpt.base.errors import ClaimLost, LaterGeneration, SupersededError, UserError
from mingpt.config.cli import build
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Process, this_process
from mingpt.training.claim import Claim, Claims, Holder, claim_places
from mingpt.training.run_folder import RunFolder


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
    """The holder of a job on another machine; this machine cannot tell whether it is alive."""
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
    for part in (f"process {agents[0].pid} on host {host}", "since 20", f"run_dir {url}"):
        assert part in str(refusal.value)
    assert str(refusal.value).endswith(f"remove its claim {url}/claim-000001.json")
    first.check()


def test_a_killed_job_is_succeeded_at_once(url: str, agents: list[subprocess.Popen[bytes]]) -> None:
    claim(url, lease_s=60).acquire(holder_of(agents[0]))
    need_proc()
    agents[0].kill()  # the process stays a zombie, since its parent has not waited for it
    began = time.monotonic()
    while holder_of(agents[0]).is_alive():
        assert time.monotonic() < began + 10
    claim(url, lease_s=60).acquire(holder_of(agents[1]))
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
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    earlier, later, next_job = claim(url), claim(url), claim(url)
    earlier.acquire(holder_of(agents[0]))
    later.acquire(holder_of(agents[0]))
    later.release()
    with pytest.raises(SupersededError, match="its claim was removed"):
        earlier.check()
    next_job.acquire(holder_of(agents[1]))
    assert next_job.number == earlier.number
    next_job.check()
    assert next_job.may_write() and not earlier.may_write()
    with pytest.raises(SupersededError, match=f"process {agents[1].pid} on host"):
        earlier.check()
    earlier.release()
    next_job.check()


def test_a_later_generation_of_a_job_takes_over_and_the_earlier_one_notices(
    url: str, agents: list[subprocess.Popen[bytes]]
) -> None:
    """The generations share one agent; another agent was replaced."""
    earlier, later = claim(url), claim(url)
    earlier.acquire(Holder((this_process(agents[0].pid), this_process(agents[1].pid))))
    later.acquire(Holder((this_process(agents[2].pid), this_process(agents[1].pid))))
    later.check()
    with pytest.raises(LaterGeneration, match="the job goes on without this worker"):
        earlier.check()
    assert later.holder and earlier.holder
    assert (later.holder.job, later.holder.since) == (earlier.holder.job, earlier.holder.since)
    earlier.renew()
    earlier.release()  # `renew` and `release` change nothing
    later.check()
    with pytest.raises(UserError):
        claim(url).acquire(holder_of(agents[0]))
    assert not later.was_started
    later.renew(started=True)
    third = claim(url)
    third.acquire(holder_of(agents[1]))
    assert third.was_started, "an earlier generation had begun"


def test_of_two_parts_of_a_job_one_goes_on_and_the_other_waits_until_it_is_gone(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher gives both the job's token. They share no agent; neither sees whether the other lives."""
    first, second = claim(url), claim(url)
    first.acquire(elsewhere("node1", job="abc"))
    timer = threading.Timer(0.7, first.renew)
    timer.start()
    began = time.monotonic()
    second.acquire(elsewhere("node2", job="abc"))
    assert time.monotonic() - began >= 0.7 + second.lease_s, "the first one goes on while it is renewed"
    (line,) = capsys.readouterr().err.splitlines()
    assert "another part of this job goes on in run_dir" in line
    with pytest.raises(LaterGeneration):
        first.check()


def test_a_holder_on_another_machine_that_renews_its_claim_is_alive(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = claim(url)
    first.acquire(elsewhere("node1"))
    timer = threading.Timer(0.7, first.renew)
    timer.start()
    began = time.monotonic()
    with pytest.raises(UserError, match="process 4242 on host node1"):
        claim(url, lease_s=60).acquire(elsewhere("node2"))
    assert time.monotonic() - began < 30
    (line,) = capsys.readouterr().err.splitlines()
    assert "node1" in line and "waiting 60 s for it to be renewed" in line
    timer.join()


def test_a_holder_on_another_machine_that_does_not_renew_loses_its_claim_after_the_lease(url: str) -> None:
    first, second = claim(url), claim(url, lease_s=1.5)
    began = time.monotonic()
    first.acquire(elsewhere("node1"))
    second.acquire(elsewhere("node2"))
    assert 1.5 <= time.monotonic() - began < 10
    with pytest.raises(SupersededError, match="node2"):
        first.check()


@pytest.mark.parametrize("content", [b"", b'{"agents": [1], "job": "a", "nonce": "b"}'])
def test_a_damaged_claim_is_somebodys_until_the_lease_ends(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "claim-000003.json").write_bytes(content)
    own = claim(str(tmp_path), lease_s=0.2)
    own.acquire(elsewhere())
    assert own.number == 4 and "an unknown process" in capsys.readouterr().err


def test_on_a_full_disk_the_next_generation_goes_on_with_the_claim_there_is(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    claim(str(tmp_path)).acquire(holder_of(agents[0]))
    later = claim(str(tmp_path))
    monkeypatch.setattr(Claim, "write_new", full)
    later.acquire(holder_of(agents[0]))
    later.check()
    agents[0].kill()
    agents[0].wait()
    with pytest.raises(OSError, match="No space left"):
        claim(str(tmp_path)).acquire(holder_of(agents[1]))


def compete(url: str, start: Barrier, results: Any) -> None:
    """Try to claim, in a process that stays alive until all have tried."""
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


def claim_together(
    folder: Path, settings: dict[str, Any], snapshots_are_shared: bool = True
) -> tuple[Claims, Claims]:
    """The claims of rank 0, which keeps the run folder and the snapshots, and those of rank 1."""
    config = build(SMALL | {"run_dir": str(folder)} | settings)

    def work(context: DistributedContext) -> Claims:
        context.exit = SimpleNamespace(on_job_end=lambda release: None)  # type: ignore[assignment]
        keeps = context.rank == 0
        return claim_places(config, context, RunFolder(folder, keeps, keeps, True, 0, snapshots_are_shared))

    first, second = run_ranks(2, work, one_node=True)
    assert isinstance(first, Claims) and isinstance(second, Claims), (first, second)
    return first, second


def take_over(url: str, is_same_job: bool) -> None:
    """Claim the place as another job does whose claim comes after all others."""
    its = claim(url)
    number, holder = its.read_newest()
    assert holder is not None
    job = holder.job if is_same_job else "another"
    its.create(number + 1, elsewhere(job=job))


@pytest.mark.parametrize(
    ("is_same_job", "error"), [(True, LaterGeneration), (False, SupersededError)], ids=["later", "other"]
)
def test_a_rank_without_a_claim_learns_that_the_snapshots_are_no_longer_the_jobs(
    is_same_job: bool, error: type[ClaimLost], tmp_path: Path
) -> None:
    place = str(tmp_path / "elsewhere")
    first, second = claim_together(tmp_path / "run", {"snapshot.path": place})
    for claims in (first, second):
        claims.check()
    take_over(place, is_same_job)
    for claims in (first, second):
        with pytest.raises(error, match=r"snapshot\.path"):
            claims.check()


def test_a_listing_that_is_late_on_another_machine_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim_together(tmp_path / "run", {})
    monkeypatch.setattr(Claim, "numbers", lambda self: [])
    second.check()
    with pytest.raises(SupersededError):
        first.check()


def test_where_each_node_has_its_own_snapshots_no_other_rank_looks_there(tmp_path: Path) -> None:
    first, second = claim_together(tmp_path / "run", {}, snapshots_are_shared=False)
    take_over(str(tmp_path / "run"), is_same_job=False)
    second.check()
    with pytest.raises(SupersededError):
        first.check()
