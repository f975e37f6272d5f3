"""A part of the programs that enumerate crash points and hostile snapshots, and that count bytes.

The others run every week, as .github/workflows/ci.yml says.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from conftest import ROOT

from mingpt.tools.jobs import clean_environment


def all_rows(*words: str) -> list[dict[str, Any]]:
    """The lines that a program prints, which must exit with 0."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def last_row(*words: str) -> dict[str, Any]:
    return all_rows(*words)[-1]


def test_the_proofs_that_run_every_week_are_programs_with_these_flags() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    assert any(".ci/run" in step.get("run", "") for step in jobs["checks"]["steps"])
    assert any("pytest -m weekly" in step.get("run", "") for step in jobs["weekly"]["steps"])
    proofs = jobs["proofs"]["strategy"]["matrix"]["proof"]
    assert len(proofs) > 5
    for proof in proofs:
        name, *words = proof.split()
        program = (ROOT / "benchmarks" / name).read_text()
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in program] == []


def test_each_fault_that_can_be_planted_has_its_place() -> None:
    faults = tomllib.loads((ROOT / "benchmarks" / "planted.toml").read_text())["fault"]
    moved = [fault["name"] for fault in faults if (ROOT / fault["file"]).read_text().count(fault["old"]) != 1]
    assert len(faults) == 60 and moved == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_wherever_a_save_is_cut_short_a_valid_snapshot_is_there() -> None:
    row = last_row("benchmarks/crash_points.py", "--stride", "11")
    assert row["ok"] == row["trials"]
    assert row["points"].keys() >= {
        "disk kill",
        "disk power",
        "disk store tears",
        "memory kill",
        "memory EIO",
    }


@pytest.mark.weekly
def test_the_bytes_and_collectives_of_a_step_are_those_of_its_strategy() -> None:
    """Under fsdp a model this small is one unit, which is gathered once in each of the two rounds."""
    strategies = ["ddp exact", "fsdp exact", "fsdp fast"]
    words = ["--workers", "2", "--micro_batches", "4", "--optimizers", "adamw", "--strategies", *strategies]
    ddp, exact, fast = all_rows("benchmarks/traffic.py", *words)
    assert ddp["step"]["calls"] == {"all_to_all": 1, "all_gather": 1, "all_reduce": 1}
    # The last all_gather is for the norms of rows.
    assert exact["step"]["calls"] == {"all_gather": 2 + 1, "all_to_all": 2, "all_reduce": 1}
    assert ddp["step"]["sent"] == pytest.approx(ddp["ring"], rel=0.01)
    assert fast["step"]["sent"] > 1.2 * exact["step"]["sent"]  # gloo's reduce_scatter is an all-reduce
    for counted in (ddp, exact, fast):
        step = counted["step"]
        assert step["sent"] < step["wire"] < 1.05 * step["sent"] + 1000 * step["messages"]
