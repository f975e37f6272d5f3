"""A node that joins a running job and cannot take part: the node is refused alone, and the job goes on."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Finish, Start, command, reached
from support.jobs import read_history
from support.shards import write_llmc

from mingpt.tools.jobs import torchrun

SETTINGS: dict[str, Any] = {"trainer__max_steps": 1_000_000, "model__n_embd": 64, "trainer__timeout_s": 20}
SETTINGS |= {"trainer__eval_every": 1_000_000, "snapshot__every": 50, "snapshot__memory_every": 5}
# A kind of newcomer: its settings, and what its refusal says.
NEWCOMERS: dict[str, tuple[dict[str, Any], str]] = {
    "other settings": ({"optimizer__learning_rate": 0.5}, "learning_rate: 0.007 -> 0.5"),
    "no text": ({"data__path": "/none/play.txt"}, "data.path /none/play.txt does not exist"),
    "no shards": ({"data__path": "/none/shards"}, "data.path /none/shards does not exist"),
    "no device": ({"trainer__device": "cuda"}, "cuda"),
    "another run's folder": ({}, "the nodes hold different runs"),
}
OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # with the shared store, torch's agents end at a newcomer
QUICK = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
TORCHRUN = ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv-conf={QUICK}"]


def launcher(kind: str, meeting: Path) -> list[str]:
    if kind == "torchrun":
        options = [*TORCHRUN, f"--rdzv_endpoint={meeting}", "--local-addr=127.0.0.1"]
        return torchrun(1, restarts=1, options=options)
    meeting.mkdir(exist_ok=True)
    options = ["--nnodes", "1:2", "--nproc", "1", "--rdzv", str(meeting), "--local_addr", "127.0.0.1"]
    return [str(ROOT / "launch" / "elastic.sh"), *options, "--max_restarts", "0", "--"]


def write_shards(folder: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 64, 30_000)
    folder.mkdir()
    write_llmc(folder / "noise_train_000000.bin", tokens[2000:])
    write_llmc(folder / "noise_val_000000.bin", tokens[:2000])


USUAL = [("anynode", "other settings"), ("torchrun", "no device")]
CASES = [(kind, newcomer) for kind in ("anynode", "torchrun") for newcomer in NEWCOMERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "newcomer"),
    [pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.weekly]) for case in CASES],
)
def test_a_newcomer_at_fault_is_refused_and_the_job_goes_on(
    kind: str, newcomer: str, start: Start, finish: Finish, text: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = SETTINGS | {"data__path": text}
    if newcomer == "no shards":
        write_shards(tmp_path / "shards")
        given |= {"data__path": tmp_path / "shards", "data__vocab_size": 64}
    places = {
        name: {"run_dir": tmp_path / name / "run", "snapshot__memory_path": tmp_path / name} for name in "ab"
    }
    own, run_dir = {name: given | place for name, place in places.items()}, tmp_path / "a" / "run"
    wrong, why = NEWCOMERS[newcomer]
    if newcomer == "another run's folder":
        finish(**own["b"] | {"trainer__max_steps": 3, "trainer__workers": 1})
    words = launcher(kind, tmp_path / "meeting")
    job = start(command(launcher=words, **own["a"]), PYTHON=sys.executable, **OWN)
    job.wait_until(reached(run_dir, 10))
    refused = start(command(launcher=words, **own["b"] | wrong), PYTHON=sys.executable, **OWN)
    assert refused.wait() != 0 and why in refused.err(), refused.err()
    assert "the job goes on without" in refused.err()
    job.wait_until(lambda: len(read_history(run_dir)["generations"]) == 2)
    (run_dir / "STOP").touch()
    assert job.wait() == 0, job.err()
    assert "the job goes on without" in job.err() and why in job.err()
    history = read_history(run_dir)
    assert history["status"] == "stopped" and [one["workers"] for one in history["generations"]] == [1, 1]
