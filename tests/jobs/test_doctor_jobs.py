"""The doctor under torchrun: only a table on a healthy cluster, a sentence per fault on a faulty one."""

import re
import sys
from collections.abc import Callable

import pytest
from support.jobs import free_port
from support.nodes import Cluster
from support.small_jobs import Start, error_of

from mingpt.tools.jobs import torchrun

DOCTOR = ["-m", "mingpt", "doctor", "trainer.device=cpu"]


@pytest.mark.parametrize(
    ("threads", "code", "said"),
    [("1", 0, "no fault found"), pytest.param("2", 1, ": 2: set OMP_NUM_THREADS", marks=pytest.mark.slow)],
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


@pytest.mark.slow
def test_a_mistake_has_exit_code_2_and_a_store_that_is_not_there_is_named_with_worker_and_host(
    start: Start,
) -> None:
    assert error_of(start([sys.executable, *DOCTOR, "seed=x"])).startswith("seed must be a valid integer")
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = error_of(start([sys.executable, *DOCTOR], TORCHELASTIC_USE_AGENT_STORE="True", **env), 1)
    assert said.startswith("worker 1 on ") and env["MASTER_PORT"] in said


# {name of a fault: (node, commands of a shell that plant the fault there, what the doctor says)}
FAULTS = {
    "port": (
        3,
        "nft 'add table ip wall; add chain ip wall in { type filter hook input priority 0; }'\n"
        "nft add rule ip wall in ip saddr NETWORK.2 tcp sport 32768-60999 drop",
        r"node2.*: the workers cannot compute together .*: let TCP ports 32768-60999 in",
    ),
    "link": (
        2,
        "tc qdisc add dev eth0 root tbf rate 80mbit burst 256k latency 50ms",
        r"node3 receives [\d.]+ MB/s from node2, less than a quarter",
    ),
}


@pytest.mark.weekly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_blocked_port_and_a_slow_link_are_found_on_three_nodes(
    cluster: Callable[..., Cluster], fault: str
) -> None:
    number, commands, expected = FAULTS[fault]
    three, jobs = cluster(3, shared=False), []
    three.nodes[number - 1].run("sh", "-ec", commands.replace("NETWORK", three.network))
    for node in three.nodes:
        options = ["--nnodes=3", "--rdzv_backend=c10d", f"--local-addr={node.address}"]
        options.append(f"--rdzv_endpoint={three.nodes[0].address}:29400")
        options.append(f"--rdzv-conf=is_host={int(node.number == 1)}")
        jobs.append(node.start([*torchrun(1, 3, options), *DOCTOR], {"GLOO_SOCKET_IFNAME": "eth0"}))
    assert [job.wait(90) for job in jobs] == [1, 1, 1]
    text = "".join(job.out() for job in jobs)
    assert re.search(rf"^fault:   {expected}", text, re.MULTILINE), text
