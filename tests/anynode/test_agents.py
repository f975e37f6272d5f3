"""Real torchrun agents, each with its own address on this machine; their workers do nothing."""

import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.jobs import Job, children, wait_until
from support.small_jobs import Start

from mingpt.tools.jobs import ROOT

WORKER = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
names = "RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "ANYNODE_JOB", "ANYNODE_ROUND"
with open(folder / "started", "a") as log:
    log.write(" ".join([sys.argv[2], *(os.environ[name] for name in names)]) + "\\n")
while not (folder / "stop").exists():
    time.sleep(0.02)
"""


class Agents:
    """Agents 1, 2, ... of one job, in a folder of its own."""

    def __init__(self, folder: Path, hosts: bool, nnodes: str) -> None:
        self.folder, self.nnodes = folder, nnodes
        self.network = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}"
        self.meeting = str(folder / "meet")
        if hosts:
            self.meeting = ",".join(f"{self.network}.{number}:29400" for number in (1, 2, 3))
        self.jobs: dict[int, Job] = {}
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)

    def start(self, *numbers: int) -> None:
        for number in numbers:
            options = {"nnodes": self.nnodes, "nproc": "1", "rdzv": self.meeting}
            words = [f"--{name}={value}" for name, value in options.items()]
            command = [
                str(ROOT / "launch" / "elastic.sh"),
                *words,
                f"--local_addr={self.network}.{number}",
                "--",
            ]
            place = self.folder if self.script.parent == self.folder else self.folder / f"node{number}"
            command += [str(self.script), str(place), str(number)]
            output = self.folder / f"agent-{number}"
            self.jobs[number] = Job(command, output, cwd=self.folder, PYTHON=sys.executable)

    def started(self) -> list[list[str]]:
        """A line for each worker that has started: agent, RANK, WORLD_SIZE, ..., ANYNODE_ROUND."""
        path = self.folder / "started"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def await_round(self, number: int, *agents: int) -> None:
        """Wait until round `number` of the job runs with exactly these agents, ranked by their addresses."""

        def members() -> list[int]:
            return sorted(int(line[0]) for line in self.started() if line[6] == str(number))

        try:
            wait_until(lambda: members() == sorted(agents), 40)
        except TimeoutError:
            errors = "\n".join(f"agent {number}:\n{job.err()[-2000:]}" for number, job in self.jobs.items())
            raise AssertionError(f"round {number} is of {members()}: {self.started()}\n{errors}") from None
        lines = sorted(
            (line for line in self.started() if line[6] == str(number)), key=lambda line: int(line[0])
        )
        assert (
            [line[1] for line in lines] == [line[3] for line in lines] == list(map(str, range(len(agents))))
        )
        assert {line[2] for line in lines} == {str(len(agents))}
        assert {line[4] for line in lines} == {f"{self.network}.{min(agents)}"}
        assert len({line[5] for line in self.started()}) == 1  # one job

    def end_workers(self, *numbers: int) -> None:
        """End the workers of these agents, as a collective that fails would."""
        for number in numbers:
            for pid in children(self.jobs[number].pid):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        (self.folder / "stop").touch()
        for number, job in self.jobs.items():
            assert job.wait(60) == 0, f"agent {number}: {job.err()[-3000:]}"


@pytest.fixture
def new_agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(hosts: bool = False, nnodes: str = "1:3") -> Agents:
        made.append(Agents(tmp_path, hosts, nnodes))
        return made[-1]

    yield make
    for agents in made:
        for job in agents.jobs.values():
            job.kill()


def test_a_board_on_a_host_of_its_own_will_do(new_agents: Callable[..., Agents], start: Start) -> None:
    agents = new_agents(nnodes="1:1")
    agents.meeting = f"{agents.network}.9:29400"
    server = start([sys.executable, "-m", "anynode", "--serve", agents.meeting])
    agents.start(1)
    agents.await_round(1, 1)
    agents.finish()
    assert server.is_running() and server.err() == ""


def test_too_few_agents_say_so_and_obey_sigterm(new_agents: Callable[..., Agents]) -> None:
    agents = new_agents(nnodes="2:3", hosts=True)
    agents.start(1)
    job = agents.jobs[1]
    job.wait_until(lambda: "waiting for more nodes" in job.err())
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(5)
    assert agents.started() == []


@pytest.mark.slow
def test_a_script_with_torch_alone_goes_on_when_the_first_agent_is_killed(
    new_agents: Callable[..., Agents],
) -> None:
    """The worker of this agent lives on, and nothing but the end of the agent tells the others."""
    agents = new_agents(hosts=True, nnodes="2:3")
    agents.script = ROOT / "examples" / "any_host_may_die.py"
    agents.start(1, 2, 3)
    first, second = agents.jobs[1], agents.jobs[2]
    first.wait_until(lambda: "round 1: 3 workers, from step 0" in first.out())
    os.kill(first.pid, signal.SIGKILL)
    second.wait_until(lambda: re.search("round 2: 2 workers, from step [1-9]", second.out()))
    agents.start(1)
    again = agents.jobs[1]
    again.wait_until(lambda: re.search("round 3: 3 workers, from step [1-9]", again.out()))
    agents.finish()
    assert "slope 3.000, offset -2.000" in again.out()


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["folder", "hosts"]
)
def test_any_agent_may_be_killed_and_replaced_or_told_to_leave(
    hosts: bool, new_agents: Callable[..., Agents]
) -> None:
    agents = new_agents(hosts)
    agents.start(1, 2, 3)
    agents.await_round(1, 1, 2, 3)
    for victim in (1, 2, 3):  # agent 1 leads the round, and has the board that the others ask first
        others = {1, 2, 3} - {victim}
        agents.jobs[victim].kill()
        agents.end_workers(*others)
        agents.await_round(2 * victim, *others)
        agents.start(victim)
        agents.await_round(2 * victim + 1, 1, 2, 3)
    leaving = agents.jobs.pop(1)
    leaving.process.send_signal(signal.SIGTERM)
    assert leaving.wait(20) == 1
    agents.end_workers(2, 3)
    agents.await_round(8, 2, 3)
    agents.finish()
