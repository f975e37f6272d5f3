"""The programs that enumerate crash points and damage, on a part of what they enumerate."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment


def last_row(*words: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, *words], cwd=ROOT / "benchmarks", env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return row


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_wherever_a_save_is_cut_short_a_valid_snapshot_is_there() -> None:
    row = last_row("crash_points.py", "--stride", "4")
    assert row["bad"] == 0 and isinstance(row["points"], dict) and {"kill", "ENOSPC", "EIO", "power", "store tears"} <= row["points"].keys()


def test_no_damage_loads_silently() -> None:
    row = last_row("damage.py", "--flips", "40")
    assert row["loaded_silently"] == 0 and row["intact_one_loads"]
