"""Real torchrun agents, each with its own address on this machine."""

import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import ROOT, Job, Start

WORKER = (
    "import os\nprint(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'ANYNODE_ROUND')))"
)


@pytest.fixture
def network() -> str:
    """What the addresses of a test's agents begin with."""
    return f"127.{random.randint(1, 250)}.{random.randint(1, 250)}"


@pytest.fixture
def start_agent(start: Start, network: str, tmp_path: Path) -> Callable[..., Job]:
    """A function that starts agent 1, 2, ..., for a worker that prints its variables or for a script.

    The worker's argument is a folder of the agent's own. By default the first three addresses are the place
    to meet.
    """
    (tmp_path / "worker.py").write_text(WORKER)
    hosts = ",".join(f"{network}.{number}:29400" for number in (1, 2, 3))

    def start_one(number: int, nnodes: str = "2:3", place: str = hosts, script: object = "worker.py") -> Job:
        options = {"nnodes": nnodes, "nproc": 1, "rdzv": place, "local_addr": f"{network}.{number}"}
        words = [f"--{name}={value}" for name, value in options.items()]
        folder, elastic = tmp_path / str(number), str(ROOT / "launch" / "elastic.sh")
        command = ["env", "-C", str(tmp_path), elastic, *words, "--", str(script), str(folder)]
        return start(command, PYTHON=sys.executable)

    return start_one


def test_a_board_on_a_host_of_its_own_will_do(
    start_agent: Callable[..., Job], start: Start, network: str
) -> None:
    place = f"{network}.9:29400"
    server = start([sys.executable, "-m", "anynode", "--serve", place])
    agent = start_agent(1, nnodes="1:1", place=place)
    assert agent.wait(60) == 0, agent.err()
    assert agent.out() == f"0 1 {network}.1 1\n"
    assert server.is_running() and server.err() == ""


def test_too_few_agents_say_so_and_obey_sigterm(start_agent: Callable[..., Job]) -> None:
    agent = start_agent(1)
    agent.wait_until(lambda: "waiting for more nodes" in agent.err())
    agent.process.send_signal(signal.SIGTERM)
    agent.process.wait(5)
    assert agent.out() == ""


@pytest.mark.slow
def test_a_script_with_torch_alone_goes_on_when_the_first_agent_is_killed(
    start_agent: Callable[..., Job],
) -> None:
    """The worker of this agent lives on, and nothing but the end of the agent tells the others."""
    script = ROOT / "examples" / "any_host_may_die.py"
    first, second, third = (start_agent(number, script=script) for number in (1, 2, 3))
    first.wait_until(lambda: "round 1: 3 workers, from step 0" in first.out())
    os.kill(first.pid, signal.SIGKILL)
    second.wait_until(lambda: re.search("round 2: 2 workers, from step [1-9]", second.out()))
    again = start_agent(1, script=script)
    again.wait_until(lambda: re.search("round 3: 3 workers, from step [1-9]", again.out()))
    for agent in (second, third, again):
        assert agent.wait(60) == 0, agent.err()
    assert "slope 3.000, offset -2.000" in again.out()
