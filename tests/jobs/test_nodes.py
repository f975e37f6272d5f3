"""Jobs over three nodes, one of which dies or is cut off: the other nodes go on, with the same bits."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Start, changed_program, command, reached
from support.jobs import read_history, read_metric, tensor_hash
from support.nodes import Cluster
from support.nodes_job import NodesJob, recorded_losses

pytestmark = pytest.mark.slow
MakeCluster = Callable[..., Cluster]
TIMEOUT_S, LIMIT_S = 5, 90
SLOW_STEPS = """
import time
events.subscribe("step_end", lambda step: time.sleep(0.05))
"""


def settings(text: Path, **more: Any) -> dict[str, Any]:
    own = {"data.path": text, "trainer.timeout_s": TIMEOUT_S, "trainer.eval_every": 100_000}
    return SMALL | own | {"snapshot.memory_path": "/dev/shm", "snapshot.memory_every": 5} | more


def make_job(cluster: Cluster, tmp_path: Path, launch: str, disk: str, given: dict[str, Any]) -> NodesJob:
    program = changed_program(tmp_path, SLOW_STEPS)
    job = NodesJob(cluster, launch, disk, 1, given, LIMIT_S, str(program))
    job.start(*job.nodes)
    return job


def assert_same_steps(run_dir: Path, step: int, undisturbed: Path) -> None:
    """Each step up to this one is on record once, in order, with the loss of the undisturbed run."""
    expected = read_metric(undisturbed)
    assert recorded_losses(run_dir)[:step] == [(number, expected[number]) for number in range(1, step + 1)]


def test_without_a_shared_disk_the_death_of_rank_0s_node_costs_few_steps_and_no_bit(
    start: Start, cluster: MakeCluster, text: Path, tmp_path: Path
) -> None:
    given = settings(text, **{"trainer.max_steps": 150, "snapshot.every": 50})
    job = make_job(cluster(3, shared=False), tmp_path, "hosts", "own", given)
    assert job.reach(67), job.errors()
    (victim,) = [node for node in job.nodes if job.rank(node) == 0]
    others = [node for node in job.nodes if node is not victim]
    since = time.time()
    victim.kill()
    died_at = job.last_step()
    on_s = job.seconds_until(lambda: job.goes_on(others, since), since)
    assert on_s is not None, job.errors()
    assert set(job.exit_codes().values()) == {0}, job.errors()
    run_dir = job.newest_run_dir(others)
    history = read_history(run_dir)
    first, second = history["generations"]
    assert first["workers"] == 3 and second["workers"] == 2 and history["status"] == "finished"
    assert died_at - 5 <= second["from_step"] <= died_at + 1 and second["from_step"] % 5 == 0
    assert history["steps_lost"] == first["to_step"] - second["from_step"] <= 6
    undisturbed = tmp_path / "undisturbed"
    alone = start(command(run_dir=undisturbed, **underscored(given)))
    assert alone.wait() == 0, alone.err()
    assert_same_steps(run_dir, 150, undisturbed)
    assert job.hashes(150) == {tensor_hash(undisturbed, 150)[:16]}


@pytest.mark.weekly
def test_a_node_whose_network_is_cut_is_left_out_and_rejoins_when_healed(
    start: Start, cluster: MakeCluster, text: Path, tmp_path: Path
) -> None:
    """The node sees the shared folder all the time."""
    given = settings(text, **{"trainer.max_steps": 100_000, "snapshot.keep_last": 100_000})
    job = make_job(cluster(3), tmp_path, "folder", "shared", given)
    (run_dir,) = job.run_dirs(job.nodes)
    assert job.reach(23), job.errors()
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
    assert job.reach(job.last_step() + 20), job.errors()
    (run_dir / "STOP").touch()
    assert set(job.exit_codes().values()) == {0}, job.errors()
    generations = read_history(run_dir)["generations"]
    assert [entry["workers"] for entry in generations] == [3, 2, 3]
    assert generations[1]["end"] == "stopped by SIGTERM", "so that the node could join"
    step = job.last_step() // 5 * 5
    undisturbed = tmp_path / "undisturbed"
    alone = start(command(run_dir=undisturbed, **underscored(given)))
    alone.wait_until(reached(undisturbed, step + 1))
    (undisturbed / "STOP").touch()
    assert alone.wait() == 0, alone.err()
    assert_same_steps(run_dir, step, undisturbed)
    assert job.hashes(step) == {tensor_hash(undisturbed, step)[:16]}


def underscored(given: dict[str, Any]) -> dict[str, Any]:
    """The settings as `command` takes them, for a job on this machine."""
    own = {"snapshot.memory_path": SMALL["snapshot.memory_path"]}
    return {key.replace(".", "__"): value for key, value in (given | own).items()}
