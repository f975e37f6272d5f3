from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.commands import refusal

import anynode
from mingpt.distributed import Launch
from mingpt.distributed.launch import AGENT_PID, JOB, ROUND, STORE_PORT

RENDEZVOUS = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCHRUN = RENDEZVOUS | {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "OMP_NUM_THREADS": "1",
    AGENT_PID: "7",
}
ANYNODE = {JOB: "token", ROUND: "7", STORE_PORT: "29600"}


WORKER = Launch(
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    node_rank=1,
    master_addr="node-0",
    master_port=29500,
    agent_hosts_store=True,
    agent_pid=7,
    restart_count=2,
    max_restarts=3,
    omp_threads=1,
    has_own_agent=True,
    has_known_launcher=True,
)


def launch_of(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> Launch:
    """What a process knows in whose environment these are a launcher's only variables."""
    for name in (*TORCHRUN, *ANYNODE, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Launch.from_environment()


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch()),
        (TORCHRUN, WORKER),
        (
            TORCHRUN | ANYNODE | {AGENT_PID: "7"},
            replace(WORKER, job="token", rdzv_round=7, master_port=29600),
        ),
        # Another launcher has no agent and no restarts.
        (RENDEZVOUS, Launch(rank=5, world_size=8, master_addr="node-0", master_port=29500)),
    ],
)
def test_the_variables_of_a_launcher_say_who_a_worker_is(
    variables: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_of(monkeypatch, variables) == launch
    assert launch.is_distributed == bool(variables)
    assert {JOB, ROUND, STORE_PORT} == {anynode.JOB, anynode.ROUND, anynode.STORE_PORT}


@pytest.mark.parametrize(
    ("agent_pid", "restart_count", "max_restarts", "expected"),
    [(7, 0, 1, True), (7, 1, 1, False), (7, 2, 3, True), (7, 0, 0, False), (None, 0, 3, False)],
)
def test_restarts_are_left_while_the_agent_has_done_fewer_than_allowed(
    agent_pid: int | None, restart_count: int, max_restarts: int, expected: bool
) -> None:
    launch = Launch(agent_pid=agent_pid, restart_count=restart_count, max_restarts=max_restarts)
    assert launch.has_restarts_left() == expected


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {name: RENDEZVOUS[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
            "sets RANK and WORLD_SIZE but not MASTER_PORT: if no launcher has set",
        ),
        (RENDEZVOUS | {"RANK": "first"}, "RANK must be a whole number, not 'first'"),
    ],
    ids=["a part", "no number"],
)
def test_variables_that_cannot_be_are_refused(
    variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sentence in refusal(launch_of, monkeypatch, variables)
