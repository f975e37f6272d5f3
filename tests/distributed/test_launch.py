from dataclasses import replace

import pytest

import anynode
from mingpt.base.errors import UserError
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
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, AGENT_PID, JOB, ROUND, STORE_PORT):
        monkeypatch.delenv(name, raising=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_there_is_one_worker_and_no_process_group() -> None:
    launch = Launch.from_environment()
    assert launch == Launch()
    assert (launch.rank, launch.world_size, launch.is_distributed) == (0, 1, False)


def test_the_variables_of_torchrun_say_who_a_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TORCHRUN | {AGENT_PID: "7"})
    launch = Launch.from_environment()
    assert launch == Launch(
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
    set_environment(monkeypatch, {JOB: "token", ROUND: "7", STORE_PORT: "29600"})
    found = Launch.from_environment()
    assert found == replace(launch, job="token", rdzv_round=7, master_port=29600)
    assert {JOB, ROUND, STORE_PORT} == {anynode.JOB, anynode.ROUND, anynode.STORE_PORT}


def test_another_launcher_has_no_agent_and_no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, RENDEZVOUS)
    launch = Launch.from_environment()
    assert launch.is_distributed
    assert (launch.rank, launch.local_rank, launch.node_rank) == (5, 0, 0)
    assert launch.agent_pid is None
    assert not launch.agent_hosts_store
    assert not launch.has_restarts_left()


@pytest.mark.parametrize(
    ("omp_threads", "setting", "threads"),
    [
        *((None, 1, 1), ("4", 1, 4), ("4", 2, 2), (None, 3, 3), ("many", 1, 1), ("", 1, 1), ("0", 1, 1)),
        *((" 8 ", 1, 8), ("4,2", 1, 4), ("-1", 1, 1), ("1e3", 1, 1), ("1024", 1, 1024)),
    ],
)
def test_omp_num_threads_is_obeyed_where_the_setting_has_its_default(
    omp_threads: str | None, setting: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if omp_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_threads)
    assert Launch.from_environment().threads(setting) == threads


@pytest.mark.parametrize(
    ("agent_pid", "restart_count", "max_restarts", "expected"),
    [(7, 0, 1, True), (7, 1, 1, False), (7, 2, 3, True), (7, 0, 0, False), (None, 0, 3, False)],
)
def test_restarts_are_left_while_the_agent_has_done_fewer_than_allowed(
    agent_pid: int | None, restart_count: int, max_restarts: int, expected: bool
) -> None:
    launch = Launch(agent_pid=agent_pid, restart_count=restart_count, max_restarts=max_restarts)
    assert launch.has_restarts_left() == expected


def test_a_launcher_that_sets_a_part_of_the_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {name: RENDEZVOUS[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")})
    with pytest.raises(
        UserError, match="sets RANK and WORLD_SIZE but not MASTER_PORT: if no launcher has set"
    ):
        Launch.from_environment()


@pytest.mark.parametrize("threads", ["1025", "100000", " 100000,1", "9" * 5000])
def test_more_threads_than_a_machine_has_are_refused(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(UserError, match=r"OMP_NUM_THREADS must be at most 1024, not [19]"):
        Launch.from_environment()


LEFT = (
    "a worker of a job of 8, and trainer.workers is ignored: if no launcher has set these, start by `env -u"
)


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        (RENDEZVOUS | {"RANK": "0"}, True),
        (RENDEZVOUS, False),
        (RENDEZVOUS | {"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),
        (RENDEZVOUS | {"RANK": "0", "SLURM_PROCID": "0"}, False),
        ({"RANK": "0", "MASTER_ADDR": "node-0"}, False),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "1"}, False),
    ],
)
def test_variables_that_no_launcher_seems_to_have_set_are_told_on_rank_0(
    variables: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    set_environment(monkeypatch, variables)
    line = Launch.from_environment().describe_leftovers()
    assert (LEFT in line) == bool(line) == is_told
