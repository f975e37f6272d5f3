"""A part of the program that enumerates crash points; .github/workflows/ci.yml runs all of it, and others."""

import json
import shutil
import subprocess
import sys
import tomllib

import pytest

from mingpt.tools.jobs import ROOT, clean_environment


def test_each_fault_that_can_be_planted_has_its_place() -> None:
    faults = tomllib.loads((ROOT / "benchmarks" / "planted.toml").read_text())["fault"]
    moved = [fault["name"] for fault in faults if (ROOT / fault["file"]).read_text().count(fault["old"]) != 1]
    assert len(faults) == 60 and moved == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_wherever_a_save_is_cut_short_a_valid_snapshot_is_there() -> None:
    command = [sys.executable, "benchmarks/crash_points.py", "--stride", "11"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["ok"] == row["trials"]
    kinds = {"disk kill", "disk power", "disk store tears", "memory kill", "memory EIO"}
    assert row["points"].keys() >= kinds
