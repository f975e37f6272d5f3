"""A node that joins a running job and cannot take part: the node is refused alone, and the job goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import read_history
from support.small_jobs import Begin, reached

from mingpt.tools.jobs import ROOT, torchrun

SETTINGS: dict[str, Any] = {"trainer__max_steps": 1_000_000, "model__n_embd": 64, "trainer__timeout_s": 20}
SETTINGS |= {"trainer__eval_every": 1_000_000, "snapshot__every": 50, "snapshot__memory_every": 5}
# With the shared store, torch's agents end at a newcomer.
SETTINGS["env"] = {"PYTHON": sys.executable, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICK = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
OTHER_SETTINGS = {"optimizer__learning_rate": 0.5}, "learning_rate: 0.007 -> 0.5"
NO_TEXT = {"data__path": "/none/play.txt"}, "data.path /none/play.txt does not exist"
NO_DEVICE = {"trainer__device": "cuda"}, "cuda"


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, list[str]]:
    """A command for each kind of agent: one node or two, with a worker each, that meet in the same place."""
    meeting = tmp_path / "meeting"
    options = ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv-conf={QUICK}"]
    options += [f"--rdzv_endpoint={meeting}", "--local-addr=127.0.0.1"]
    own = ["--nnodes", "1:2", "--nproc", "1", "--rdzv", f"{meeting}s", "--local_addr", "127.0.0.1"]
    elastic = [str(ROOT / "launch" / "elastic.sh"), *own, "--max_restarts", "0", "--"]
    return {"torchrun": torchrun(1, restarts=1, options=options), "anynode": elastic}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "newcomer"),
    [
        ("anynode", OTHER_SETTINGS),
        ("torchrun", NO_DEVICE),
        pytest.param("anynode", NO_TEXT, marks=pytest.mark.weekly),
        pytest.param("torchrun", OTHER_SETTINGS, marks=pytest.mark.weekly),
    ],
    ids=["anynode-settings", "torchrun-device", "anynode-text", "torchrun-settings"],
)
def test_a_newcomer_at_fault_is_refused_and_the_job_goes_on(
    kind: str,
    newcomer: tuple[dict[str, Any], str],
    launchers: dict[str, list[str]],
    begin: Begin,
    tmp_path: Path,
) -> None:
    run_dir, (wrong, why) = tmp_path / "a" / "run", newcomer
    given = SETTINGS | {"launcher": launchers[kind]}
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
