"""The doctor under torchrun: only a table on a healthy cluster, a sentence per fault on a faulty one."""

import pytest
from support.jobs import Start, free_port, torchrun

DOCTOR = ["-m", "mingpt", "doctor", "trainer.device=cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "code", "said"), [("1", 0, "no fault found"), ("2", 1, ": 2: set OMP_NUM_THREADS")]
)
def test_two_agents_get_one_table_and_a_sentence_if_they_differ(
    start: Start, threads: str, code: int, said: str
) -> None:
    """A fault ends the job without restarts."""
    options = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    jobs = [start([*torchrun(1, 3, options), *DOCTOR], OMP_NUM_THREADS=one) for one in ("1", threads)]
    assert [job.wait(60) for job in jobs] == [code, code], [job.out() + job.err() for job in jobs]
    lines = "".join(job.out() for job in jobs).splitlines()
    shown = [line[:7] for line in lines if line.startswith(("host", "threads"))]
    assert shown == ["host   ", *["threads"] * (1 + code)]
    assert said in "".join(lines) and sum(line.startswith("fault:") for line in lines) == code
    assert all(job.err().count("error: worker") == code for job in jobs)
