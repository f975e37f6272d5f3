"""launch/slurm/ on a real slurmctld with two slurmd: each script's run has the bits of an undisturbed run."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import last_step, read_history, read_metric, wait_until
from support.slurm import MISSING, SlurmCluster
from support.small_jobs import command, final_hash, reached, snapshot_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}; on Debian: apt install slurm-wlm"),
]
STEPS = 80
WAIT_S = 120
# A step takes some 10 ms: Slurm takes a second to preempt a job, which must still be running then.
RUN: dict[str, Any] = {
    "trainer__batch_size": 32,
    "trainer__max_steps": STEPS,
    "trainer__eval_every": 40,
    "trainer__log_every": 5,
    "snapshot__every": 10,
}
# The scripts override the first two settings, which a cluster may have.
SETTINGS = {
    "KillOnBadExit": 1,
    "WaitTime": 2,
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=100000",
}
PARTITIONS = (
    "main Default=YES PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE",
    "urgent PriorityTier=10 PreemptMode=OFF",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with SlurmCluster(folder, settings=SETTINGS, partitions=PARTITIONS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(reference: Callable[..., Path]) -> Path:
    """The run folder of a single worker that nothing disturbed."""
    return reference(1, **RUN)


def submit(
    cluster: SlurmCluster, script: str, folder: Path, text: Path, *options: str, **more: object
) -> int:
    """Submit a job; returns its id."""
    options = (f"--output={folder}/output", "--cpus-per-task=1", *options)
    settings = RUN | {"run_dir": folder / "run", "data__path": text, "trainer__workers": 2} | more
    words = command(launcher=options, program=f"launch/slurm/{script}", **settings)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return cluster.submit(*words, PATH=path, RENDEZVOUS=f"{folder}/meet")


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def test_a_job_on_one_node_finishes_with_the_bits_of_one_process(
    cluster: SlurmCluster, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(cluster, "one_node.sbatch", tmp_path, text, "--cpus-per-task=2")
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert final_hash(tmp_path / "run", STEPS) == final_hash(undisturbed, STEPS)
    (generation,) = read_history(tmp_path / "run")["generations"]
    assert generation["workers"] == 2


def test_a_job_that_is_preempted_twice_finishes_with_the_same_bits(
    cluster: SlurmCluster, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first preemption is the signal before the time limit, the second for a job of higher priority."""
    run_dir = tmp_path / "run"
    job = submit(cluster, "preemptible.sbatch", tmp_path, text, "--nodes=2", snapshot__every=1000)
    wait_until(reached(run_dir, 5), WAIT_S)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    cluster.start_again(job, 1)
    first = snapshot_steps(run_dir)
    wait_until(reached(run_dir, first[-1] + 5), WAIT_S)
    urgent = cluster.submit(
        "--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true", "--output=/dev/null"
    )
    cluster.start_again(job, 2)
    second = snapshot_steps(run_dir)
    cluster.wait_for_state(urgent, "COMPLETED")
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert cluster.job(job)["Restarts"] == "2"
    assert len(first) == 1 and len(second) == 2 and 5 <= first[0] < second[1] < STEPS
    history = read_history(run_dir)
    ends = [generation["end"] for generation in history["generations"]]
    assert ends == ["stopped by STOP", "stopped by SIGTERM", "finished"] and history["steps_lost"] == 0
    assert final_hash(run_dir, STEPS) == final_hash(undisturbed, STEPS)
    assert read_metric(run_dir) == read_metric(undisturbed)
    assert not (run_dir / "STOP").exists()


@pytest.mark.parametrize("script", ["one_node.sbatch", "preemptible.sbatch"])
def test_a_job_that_is_cancelled_leaves_a_snapshot_and_no_process(
    script: str, cluster: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(cluster, script, tmp_path, text, snapshot__every=1000, trainer__max_steps=10_000)
    wait_until(reached(run_dir, 5), WAIT_S)
    pids = cluster.job_pids()
    assert len(pids) >= 3
    cluster.run("scancel", str(job))
    wait_until(lambda: not cluster.job_pids(), WAIT_S)
    cluster.wait_for_state(job, "CANCELLED")
    (stopped_at,) = snapshot_steps(run_dir)
    assert stopped_at >= 5 and read_history(run_dir)["status"] == "stopped", output(tmp_path)


@pytest.mark.parametrize("script", ["one_node.sbatch", "preemptible.sbatch"])
def test_a_mistake_in_the_settings_is_one_line_and_not_tried_again(
    script: str, cluster: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    job = submit(cluster, script, tmp_path, text, optimizer__learning_rat=1)
    assert cluster.wait_for_state(job, "FAILED", "COMPLETED") == "FAILED"
    assert cluster.job(job)["ExitCode"] == "2:0" and cluster.job(job)["Restarts"] == "0"
    lines = output(tmp_path).splitlines()
    own = [line for line in lines if not line.startswith("srun: ")]  # srun's lines may come first
    assert own[0].startswith("error: ") and "learning_rate" in own[0]


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_node_that_is_set_down_does_not_end_the_run(
    node: str, cluster: SlurmCluster, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """If it is the first node, the job's script dies with it; the job is queued again to end in order."""
    run_dir = tmp_path / "run"
    job = submit(cluster, "several_nodes.sbatch", tmp_path, text)
    try:
        wait_until(reached(run_dir, 5), WAIT_S)
        cluster.kill_node(node)
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        assert last_step(run_dir) < STEPS
        wait_until(lambda: read_history(run_dir)["status"] == "finished", WAIT_S)
    finally:
        cluster.start_node(node)
    if node == "n1":
        cluster.start_again(job, 1)
    state = cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert state == "COMPLETED" and cluster.job(job)["Restarts"] == str(int(node == "n1")), output(tmp_path)
    sizes = [generation["workers"] for generation in read_history(run_dir)["generations"]]
    assert sizes == [2, 1]
    assert final_hash(run_dir, STEPS) == final_hash(undisturbed, STEPS)
