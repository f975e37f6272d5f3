"""The doctor under torchrun: only a table on a healthy cluster, a sentence per fault on a faulty one."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, Start, error_of
from support.jobs import free_port
from support.nodes import why_no_cluster

from mingpt.tools.jobs import clean_environment, torchrun

DOCTOR = ["-m", "mingpt", "doctor", "trainer.device=cpu"]


@pytest.mark.parametrize(
    ("threads", "code", "said"),
    [
        ("1", 0, "no fault found"),
        pytest.param("2", 1, ": threads is 2, on the others 1: set OMP_NUM_THREADS", marks=pytest.mark.slow),
    ],
)
def test_two_agents_get_one_table_and_a_sentence_if_they_differ(
    start: Start, threads: str, code: int, said: str
) -> None:
    """A fault ends the job without restarts."""
    options = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    command = [*torchrun(1, 3, options), *DOCTOR]
    jobs = [start(command, OMP_NUM_THREADS=one) for one in ("1", threads)]
    assert [job.wait(60) for job in jobs] == [code, code]
    lines = "".join(job.out() for job in jobs).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line[:4] for line in lines if line.startswith(("host", "MB/s"))] == ["host"] * 2 + ["MB/s"] * 2
    assert said in " ".join(lines) and sum(line.startswith("fault:") for line in lines) == code
    assert all(job.err().count("error: worker") == code for job in jobs)


@pytest.mark.slow
def test_a_store_that_is_not_there_is_named_with_worker_and_host(start: Start) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = start([sys.executable, *DOCTOR], TORCHELASTIC_USE_AGENT_STORE="True", **env)
    said = error_of(job, 1)
    assert said.startswith("worker 1 on ") and env["MASTER_PORT"] in said


@pytest.mark.slow
def test_alone_it_shows_this_host_and_a_mistake_has_exit_code_2(start: Start) -> None:
    job = start([sys.executable, *DOCTOR])
    assert job.wait(60) == 0 and job.out().endswith("no fault found\n"), job.err()
    assert error_of(start([sys.executable, *DOCTOR, "seed=x"])).startswith("seed must be a valid integer")


@pytest.mark.weekly
@pytest.mark.skipif(why_no_cluster() is not None, reason=why_no_cluster() or "")
def test_a_blocked_port_and_another_torch_are_found_on_three_nodes() -> None:
    """These are two kinds of faults; the benchmark has all kinds."""
    command = [sys.executable, "benchmarks/doctor.py", "--only", "port", "torch"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"trials": 2, "ok": 2}
