"""Jobs over nodes, one of which dies, is cut off, or joins: the others go on, with the same bits."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import (
    ROOT,
    SMALL,
    Begin,
    changed_program,
    generations,
    reached,
    read_history,
    recorded,
    snapshot_steps,
    tensor_hash,
    torchrun,
)
from support.nodes import Cluster
from support.nodes_job import NodesJob

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
        own = {"data__path": text, "snapshot__memory_path": "/dev/shm", "snapshot__memory_every": 5}
        given = SMALL | {key.replace("__", "."): value for key, value in (SETTINGS | own | more).items()}
        program = str(changed_program(tmp_path, SLOW_STEPS))
        job = NodesJob(cluster(3, shared=disk == "shared"), launch, disk, 1, given, LIMIT_S, program)
        job.start(*job.nodes)
        assert job.reach(23), job.errors()
        return job

    return make_job


def assert_ends_as(job: NodesJob, run_dir: Path, expected: Path) -> None:
    """Assert that the job ends well, with each step on record once, in order, as in the undisturbed run."""
    assert set(job.exit_codes().values()) == {0}, job.errors()
    found = recorded(run_dir)
    assert found == recorded(expected)[: len(found)]
    step = max({*snapshot_steps(run_dir)} & {*snapshot_steps(expected)})
    assert job.hashes(step) == {tensor_hash(expected, step)[:16]}


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
    assert_ends_as(job, run_dir, reference(1, **SETTINGS, **given))
    assert job.hashes(150), "the job is finished"
    first, second = generations(run_dir)
    assert first["workers"] == 3 and second["from_step"] >= died_at - most_lost
    assert read_history(run_dir)["steps_lost"] == first["to_step"] - second["from_step"] <= most_lost + 1


@pytest.mark.weekly
def test_a_node_whose_network_is_cut_is_left_out_and_rejoins_when_healed(
    on_three_nodes: MakeJob, reference: Reference
) -> None:
    """The node sees the shared folder all the time."""
    given = {"trainer__max_steps": 600, "snapshot__every": 25}
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
    assert rejoined_s is not None and job.reach(job.last_step() + 20), job.errors()
    (run_dir / "STOP").touch()
    assert_ends_as(job, run_dir, reference(1, **SETTINGS, **given))
    assert [entry["workers"] for entry in generations(run_dir)] == [3, 2, 3]
    assert generations(run_dir)[1]["end"] == "stopped by SIGTERM", "so that the node could join"


LONG: dict[str, Any] = {"trainer__max_steps": 1_000_000, "model__n_embd": 64, "trainer__timeout_s": 20}
LONG |= {"trainer__eval_every": 1_000_000, "snapshot__every": 50, "snapshot__memory_every": 5}
LONG["trainer__compile"] = False  # so long a run would be compiled
# With the shared store, torch's agents end at a newcomer.
LONG["env"] = {"PYTHON": sys.executable, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICK = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
OTHER_SETTINGS = {"optimizer__learning_rate": 0.5}, "learning_rate: 0.007 -> 0.5"
NO_DEVICE = {"trainer__device": "cuda"}, "cuda"


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, list[str]]:
    """A command for each kind of agent, which starts a worker; two agents with one command share a job."""
    meeting = tmp_path / "meeting"
    options = ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv-conf={QUICK}"]
    options += [f"--rdzv_endpoint={meeting}", "--local-addr=127.0.0.1"]
    own = ["--nnodes", "1:2", "--nproc", "1", "--rdzv", f"{meeting}s", "--local_addr", "127.0.0.1"]
    elastic = [str(ROOT / "launch" / "elastic.sh"), *own, "--max_restarts", "0", "--"]
    return {"torchrun": torchrun(1, restarts=1, options=options), "anynode": elastic}


@pytest.mark.parametrize(
    ("kind", "newcomer"),
    [("anynode", OTHER_SETTINGS), ("torchrun", NO_DEVICE)],
    ids=["anynode-settings", "torchrun-device"],
)
def test_a_newcomer_at_fault_is_refused_and_the_job_goes_on(
    kind: str,
    newcomer: tuple[dict[str, Any], str],
    launchers: dict[str, list[str]],
    begin: Begin,
    tmp_path: Path,
) -> None:
    run_dir, (wrong, why) = tmp_path / "a" / "run", newcomer
    given = LONG | {"launcher": launchers[kind]}
    job = begin(run_dir=run_dir, snapshot__memory_path=tmp_path / "a", **given)
    job.wait_until(reached(run_dir, 10))
    late = begin(
        **given | {"run_dir": tmp_path / "b" / "run", "snapshot__memory_path": tmp_path / "b"} | wrong
    )
    assert late.wait() != 0 and why in late.err() and "the job goes on without" in late.err(), late.err()
    job.wait_until(lambda: len(read_history(run_dir)["generations"]) == 2)
    (run_dir / "STOP").touch()
    assert job.wait() == 0, job.err()
    assert "the job goes on without" in job.err() and why in job.err()
    history = read_history(run_dir)
    assert history["status"] == "stopped" and [one["workers"] for one in history["generations"]] == [1, 1]
