"""The doctor under torchrun: only a table on a healthy cluster, one sentence per fault on a faulty one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, Start
from support.jobs import Job, free_port
from support.nodes import why_no_cluster

from mingpt.tools.jobs import clean_environment, torchrun


def start_agents(start: Start, folder: Path, text: Path, *changes: dict[str, str]) -> list[Job]:
    """Start an agent with one worker per dict, as if on as many nodes; names in capitals are variables."""
    options = [f"--nnodes={len(changes)}", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    jobs = []
    for change in changes:
        env = {key: value for key, value in change.items() if key.isupper()}
        own = {key: value for key, value in change.items() if not key.isupper()}
        settings = SMALL | {"run_dir": folder / "run", "data.path": text} | own
        words = [f"{key}={value}" for key, value in settings.items()]
        launcher = torchrun(1, restarts=3, options=options)
        jobs.append(start([*launcher, "-m", "mingpt", "doctor", *words], **env))
    return jobs


def said(jobs: list[Job]) -> list[str]:
    return "".join(job.out() for job in jobs).splitlines()


def test_a_healthy_cluster_gets_a_table_and_one_line(start: Start, text: Path, tmp_path: Path) -> None:
    jobs = start_agents(start, tmp_path, text, {}, {})
    assert [job.wait(60) for job in jobs] == [0, 0], "".join(job.err() for job in jobs)
    head, first, second, empty, last = said(jobs)
    assert head.split()[:4] == ["worker", "host", "device", "torch"]
    assert first.startswith("0 ") and second.startswith("1 ") and (empty, last) == ("", "no fault found")
    assert "MB/s" in first and "MB/s" in second
    assert list(tmp_path.iterdir()) == []  # the doctor writes no file


@pytest.mark.slow
def test_a_fault_is_one_sentence_and_ends_the_job_without_restarts(
    start: Start, text: Path, tmp_path: Path
) -> None:
    jobs = start_agents(start, tmp_path, text, {}, {"seed": "7"})
    assert [job.wait(60) for job in jobs] == [1, 1]
    lines = said(jobs)
    (fault,) = [line for line in lines if line.startswith("fault: ")]
    assert "is started with seed=7, the others with 1337" in fault and "(node " in fault
    assert sum(line.startswith("worker ") for line in lines) == 1  # there was a single generation
    errors = [line for job in jobs for line in job.err().splitlines() if line.startswith("error:")]
    assert errors == ["error: 1 fault found"]


@pytest.mark.parametrize(
    ("rank", "sentences"),
    [
        pytest.param(
            0,
            ["worker 1 did not reach the rendezvous within 20 s", "reaches TCP port 127.0.0.1"],
            marks=pytest.mark.slow,
        ),
        (1, ["cannot use the workers' store at 127.0.0.1:", "connection refused"]),
    ],
)
def test_a_worker_that_does_not_come_and_a_store_that_is_not_there_are_named(
    rank: int, sentences: list[str], start: Start, tmp_path: Path, text: Path
) -> None:
    """Only one of two workers comes; without rank 0 there is no store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = str(store.port if store else free_port())
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = start(
        [sys.executable, "-m", "mingpt", "doctor", f"data.path={text}", f"run_dir={tmp_path / 'run'}"], **env
    )
    assert job.wait(60) == 1
    (error,) = job.err().splitlines()
    for words in sentences:
        assert words in error


@pytest.mark.slow
def test_alone_it_is_one_row(start: Start, text: Path, tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}", f"data.path={text}", *(f"{key}={value}" for key, value in SMALL.items())]
    job = start([sys.executable, "-m", "mingpt", "doctor", *words])
    assert job.wait(60) == 0, job.err()
    assert len(job.out().splitlines()) == 4 and job.out().endswith("no fault found\n")
    job = start([sys.executable, "-m", "mingpt", "doctor", *words, "seed=x"])
    assert job.wait(60) == 2 and job.err().startswith("error: seed must be a valid integer")


@pytest.mark.weekly
@pytest.mark.skipif(why_no_cluster() is not None, reason=why_no_cluster() or "")
def test_a_blocked_port_and_another_torch_are_found_on_three_nodes() -> None:
    """These are two kinds of faults; the benchmark has all kinds."""
    command = [sys.executable, "benchmarks/doctor.py", "--only", "port", "torch"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"trials": 2, "ok": 2}
