"""Jobs over nodes, one of which dies or is cut off: the other nodes go on, with the same bits."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import read_history, read_metric, recorded, tensor_hash
from support.nodes import Cluster
from support.nodes_job import NodesJob
from support.small_jobs import SMALL, changed_program, generations

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
        given = (
            SMALL
            | given
            | {"data.path": text, "snapshot.memory_path": "/dev/shm", "snapshot.memory_every": 5}
        )
        program = str(changed_program(tmp_path, SLOW_STEPS))
        job = NodesJob(cluster(3, shared=disk == "shared"), launch, disk, 1, given, LIMIT_S, program)
        job.start(*job.nodes)
        assert job.reach(23), job.errors()
        return job

    return make_job


def assert_ends_as(job: NodesJob, run_dir: Path, expected: Path, steps: int) -> None:
    """Assert that the job ends well, with each step on record once, in order, as in the undisturbed run."""
    assert set(job.exit_codes().values()) == {0}, job.errors()
    assert read_history(run_dir)["status"] == "finished"
    assert recorded(run_dir) == sorted(read_metric(expected).items())
    assert job.hashes(steps) == {tensor_hash(expected, steps)[:16]}


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("ddp", signal.SIGKILL),
        pytest.param("fsdp", signal.SIGKILL, marks=pytest.mark.weekly),
        pytest.param("fsdp", signal.SIGTERM, marks=pytest.mark.weekly),
    ],
)
def test_without_a_shared_disk_the_loss_of_rank_0s_node_costs_few_steps_and_no_bit(
    strategy: str, how: signal.Signals, on_three_nodes: MakeJob, reference: Reference
) -> None:
    """Under fsdp its part of the state is gone: another node has a copy, also after an orderly stop."""
    given = {"trainer__max_steps": 150, "snapshot__every": 50}
    job = on_three_nodes("hosts", "own", trainer__parallel=strategy, **given)
    assert job.reach(67), job.errors()
    (victim,) = [node for node in job.nodes if job.rank(node) == 0]
    others = [node for node in job.nodes if node is not victim]
    since = time.time()
    if how == signal.SIGKILL:
        victim.kill()
    else:
        os.kill(job.running.pop(victim).pid, how)
    died_at = job.last_step()
    on_s = job.seconds_until(lambda: job.goes_on(others, since, 2), since)
    assert on_s is not None, job.errors()
    run_dir, most_lost = job.newest_run_dir(others), 5 if strategy == "ddp" else 10
    assert_ends_as(job, run_dir, reference(1, **SETTINGS, **given), 150)
    first, second = generations(run_dir)
    assert first["workers"] == 3 and second["from_step"] >= died_at - most_lost
    assert read_history(run_dir)["steps_lost"] == first["to_step"] - second["from_step"] <= most_lost + 1


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
