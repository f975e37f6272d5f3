"""Jobs over nodes, one of which dies or is cut off: the other nodes go on, with the same bits."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Job, last_step, read_history, read_metric, tensor_hash
from support.nodes import Cluster
from support.nodes_job import NodesJob, recorded_losses
from support.small_jobs import (
    SMALL,
    Begin,
    changed_program,
    final_hash,
    generations,
    reached,
    snapshot_steps,
)

from mingpt.tools.jobs import torchrun

pytestmark = pytest.mark.slow
MakeJob = Callable[..., NodesJob]
Reference = Callable[..., Path]
TIMEOUT_S, LIMIT_S = 5, 90
SLOW_STEPS = 'import time; events.subscribe("step_end", lambda step: time.sleep(0.05))'
SETTINGS: dict[str, Any] = {"trainer__timeout_s": TIMEOUT_S, "trainer__eval_every": 100_000}


@pytest.fixture
def on_three_nodes(cluster: Callable[..., Cluster], text: Path, tmp_path: Path) -> MakeJob:
    """A function that starts a job in namespaces, whose steps take a twentieth of a second or longer."""

    def make_job(launch: str, disk: str, **more: Any) -> NodesJob:
        given = {key.replace("__", "."): value for key, value in (SETTINGS | more).items()}
        given = SMALL | given | {"data.path": text, "snapshot.memory_path": "/dev/shm", "snapshot.memory_every": 5}
        program = str(changed_program(tmp_path, SLOW_STEPS))
        job = NodesJob(cluster(3, shared=disk == "shared"), launch, disk, 1, given, LIMIT_S, program)
        job.start(*job.nodes)
        assert job.reach(23), job.errors()
        return job

    return make_job


def assert_ends_as(job: NodesJob, run_dir: Path, expected: Path, steps: int) -> None:
    """Assert that the job ends well, with each step on record once and in order, as in the undisturbed run."""
    assert set(job.exit_codes().values()) == {0}, job.errors()
    assert read_history(run_dir)["status"] == "finished"
    assert recorded_losses(run_dir) == sorted(read_metric(expected).items())
    assert job.hashes(steps) == {tensor_hash(expected, steps)[:16]}


def test_without_a_shared_disk_the_death_of_rank_0s_node_costs_few_steps_and_no_bit(
    on_three_nodes: MakeJob, reference: Reference
) -> None:
    given = {"trainer__max_steps": 150, "snapshot__every": 50}
    job = on_three_nodes("hosts", "own", **given)
    assert job.reach(67), job.errors()
    (victim,) = [node for node in job.nodes if job.rank(node) == 0]
    others = [node for node in job.nodes if node is not victim]
    since = time.time()
    victim.kill()
    died_at = job.last_step()
    on_s = job.seconds_until(lambda: job.goes_on(others, since), since)
    assert on_s is not None, job.errors()
    run_dir = job.newest_run_dir(others)
    assert_ends_as(job, run_dir, reference(1, **SETTINGS, **given), 150)
    first, second = generations(run_dir)
    assert first["workers"] == 3 and second["workers"] == 2
    assert died_at - 5 <= second["from_step"] <= died_at + 1 and second["from_step"] % 5 == 0
    assert read_history(run_dir)["steps_lost"] == first["to_step"] - second["from_step"] <= 6


@pytest.mark.weekly
def test_a_node_whose_network_is_cut_is_left_out_and_rejoins_when_healed(
    on_three_nodes: MakeJob, reference: Reference
) -> None:
    """The node sees the shared folder all the time."""
    given = {"trainer__max_steps": 1500, "snapshot__every": 100}
    job = on_three_nodes("folder", "shared", **given)
    (run_dir,) = job.run_dirs(job.nodes)
    victim, *others = job.nodes
    since = time.time()
    victim.cut_network()
    on_s = job.seconds_until(lambda: job.goes_on(others, since, 2), since)
    assert on_s is not None and on_s <= TIMEOUT_S + 15, job.errors()
    assert job.reach(job.last_step() + 20), job.errors()
    since = time.time()
    victim.heal()
    rejoined_s = job.seconds_until(lambda: job.goes_on(job.nodes, since, 3), since)
    assert rejoined_s is not None, job.errors()
    assert_ends_as(job, run_dir, reference(1, **SETTINGS, **given), 1500)
    assert [entry["workers"] for entry in generations(run_dir)] == [3, 2, 3]
    assert generations(run_dir)[1]["end"] == "stopped by SIGTERM", "so that the node could join"


QUICK = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
SLOW: dict[str, Any] = {"trainer__max_steps": 60, "model__n_embd": 128, "trainer__batch_size": 16}
OWN_COPIES: dict[str, Any] = {"trainer__parallel": "fsdp", "snapshot__every": 1000, "snapshot__memory_every": 5}


@pytest.fixture
def two_agents(begin: Begin, tmp_path: Path) -> Callable[..., dict[Path, Job]]:
    """A function that starts torchrun twice; each agent stands for a node with a disk and a memory.

    It returns {run folder: job}.
    """
    options = ["--nnodes=1:2", "--rdzv_backend=c10d", f"--rdzv_endpoint={tmp_path / 'rendezvous'}"]
    options += ["--rdzv_id=test", f"--rdzv-conf={QUICK}", "--local-addr=127.0.0.1"]
    given = {"launcher": torchrun(1, 20, options), "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}

    def start_both(**settings: Any) -> dict[Path, Job]:
        jobs = {}
        for node in (tmp_path / "a", tmp_path / "b"):
            (node / "shm").mkdir(parents=True)
            own = {"run_dir": node / "run", "snapshot__memory_path": node / "shm"}
            jobs[node / "run"] = begin(**given, **own, **settings)
        return jobs

    return start_both


@pytest.mark.weekly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_loss_of_the_first_node_costs_no_bit_and_no_record(
    how: signal.Signals, two_agents: Callable[..., dict[Path, Job]], reference: Reference
) -> None:
    """The node's half of the state is gone with its disk: the other node has a copy.

    That holds as well after an orderly stop, since the only snapshot on disk is that node's.
    """
    jobs = two_agents(snapshot__local_every=0, **SLOW, **OWN_COPIES)
    any_job = next(iter(jobs.values()))
    any_job.wait_until(lambda: all(reached(run_dir, 12)() for run_dir in jobs))
    assert len({read_history(run_dir)["id"] for run_dir in jobs}) == 1
    (first,) = [run_dir for run_dir in jobs if "a fresh run" in jobs[run_dir].err()]
    (other,) = jobs.keys() - {first}
    if how == signal.SIGKILL:
        jobs[first].kill()
    else:
        os.kill(jobs[first].pid, how)
    died_at = last_step(other)
    assert jobs[other].wait() == 0, jobs[other].err()
    lost, last = generations(other)
    assert (lost["workers"], last["workers"], last["restart"]) == (2, 1, True)
    assert 0 < last["from_step"] <= died_at <= lost["to_step"] <= last["from_step"] + 5 + 1, (lost, last)
    assert read_history(other)["steps_lost"] == lost["to_step"] - last["from_step"]
    expected = reference(1, **SLOW)
    assert recorded_losses(other) == sorted(read_metric(expected).items())
    assert tensor_hash(other, 60) == tensor_hash(expected, 60)


def test_every_node_ends_with_the_whole_run_on_its_disk(
    two_agents: Callable[..., dict[Path, Job]], undisturbed: Path
) -> None:
    for run_dir, job in two_agents().items():
        assert job.wait() == 0, job.err()
        assert final_hash(run_dir) == final_hash(undisturbed)
        assert read_history(run_dir)["status"] == "finished"
        assert recorded_losses(run_dir) == sorted(read_metric(undisturbed).items())
        assert snapshot_steps(run_dir) == [*range(5, 31, 5)]
        assert os.listdir(run_dir.parent / "shm") == []
