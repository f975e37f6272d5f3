"""Two agents on one machine that stand for nodes with a disk and a memory each."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Start, command, final_hash, reached, snapshot_steps
from support.jobs import Job, last_step, read_history, read_metric, tensor_hash

from mingpt.tools.jobs import torchrun

SHARING_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICK = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
SLOW: dict[str, Any] = {"trainer__max_steps": 60, "model__n_embd": 128, "trainer__batch_size": 16}


class Node:
    """A stand-in for a node: folders for its disk and its memory, and a way to start an agent."""

    def __init__(self, start: Start, text: Path, tmp_path: Path, name: str) -> None:
        self.start_job, self.text, self.meeting = start, text, tmp_path / "rendezvous"
        self.run_dir, self.shm = tmp_path / name / "run", tmp_path / name / "shm"
        self.shm.mkdir(parents=True)

    def start(self, **settings: Any) -> Job:
        options = ["--nnodes=1:2", "--rdzv_backend=c10d", f"--rdzv_endpoint={self.meeting}", "--rdzv_id=test"]
        options += [f"--rdzv-conf={QUICK}", "--local-addr=127.0.0.1"]
        given = {
            "run_dir": self.run_dir,
            "data__path": self.text,
            "snapshot__memory_path": self.shm,
        } | settings
        return self.start_job(command(launcher=torchrun(1, 20, options), **given), **SHARING_OFF)


def one_curve(run_dir: Path, steps: int) -> bool:
    lines = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if "train/loss" in line]
    return len(lines) == steps == len(read_metric(run_dir))


@pytest.fixture(scope="module")
def quiet(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one worker's run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("quiet")
    words = command(run_dir=folder / "run", data__path=text, trainer__workers=1, **SLOW)
    job = Job(words, folder / "job", cwd=ROOT)
    assert job.wait() == 0, job.err()
    return folder / "run"


@pytest.mark.weekly
@pytest.mark.parametrize(("parallel", "how"), [("ddp", "killed"), ("fsdp", "killed"), ("fsdp", "told to go")])
def test_the_loss_of_the_first_node_costs_no_bit_and_no_record(
    parallel: str, how: str, start: Start, text: Path, quiet: Path, tmp_path: Path
) -> None:
    """The node's disk is gone too, and under fsdp its half of the state: the other node has a copy.

    That holds as well after an orderly stop, since the only snapshot on disk is that node's.
    """
    nodes = [Node(start, text, tmp_path, name) for name in "ab"]
    settings = SLOW | {"snapshot__memory_every": 5, "snapshot__local_every": 0, "trainer__parallel": parallel}
    settings["snapshot__every"] = 20 if parallel == "ddp" else 1000
    jobs = [node.start(**settings) for node in nodes]
    jobs[0].wait_until(lambda: all(reached(node.run_dir, 12)() for node in nodes))
    assert [read_history(node.run_dir)["generations"][0]["workers"] for node in nodes] == [2, 2]
    assert read_history(nodes[0].run_dir)["id"] == read_history(nodes[1].run_dir)["id"]
    first = next(number for number, job in enumerate(jobs) if "a fresh run" in job.err())
    other = nodes[1 - first]
    if how == "killed":
        jobs[first].kill()
    else:
        os.kill(jobs[first].pid, signal.SIGTERM)
    died_at = last_step(other.run_dir)
    assert jobs[1 - first].wait() == 0, jobs[1 - first].err()
    lost, last = read_history(other.run_dir)["generations"]
    assert (last["workers"], last["restart"]) == (1, True)
    assert 0 < last["from_step"] <= lost["to_step"] <= last["from_step"] + 5 + 1, (lost, last)
    assert lost["to_step"] >= died_at
    history = read_history(other.run_dir)
    assert history["steps_lost"] == lost["to_step"] - last["from_step"]
    assert one_curve(other.run_dir, 60)
    assert tensor_hash(other.run_dir, 60) == tensor_hash(quiet, 60)


@pytest.mark.slow
def test_every_node_ends_with_the_whole_run_on_its_disk(start: Start, text: Path, tmp_path: Path) -> None:
    nodes = [Node(start, text, tmp_path, name) for name in "ab"]
    for job in [node.start() for node in nodes]:
        assert job.wait() == 0, job.err()
    hashes = {final_hash(node.run_dir) for node in nodes}
    assert len(hashes) == 1
    for node in nodes:
        assert read_history(node.run_dir)["status"] == "finished"
        assert one_curve(node.run_dir, 30)
        assert snapshot_steps(node.run_dir) == [*range(5, 31, 5)]
        assert os.listdir(node.shm) == []
