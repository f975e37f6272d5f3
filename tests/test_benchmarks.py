"""The programs that enumerate crash points, damage and hostile snapshots, on a part of these."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT

from mingpt.jobs import clean_environment


def last_row(*words: str) -> dict[str, Any]:
    """The last line that a program prints; it must exit with 0."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_wherever_a_save_is_cut_short_a_valid_snapshot_is_there() -> None:
    row = last_row("benchmarks/crash_points.py", "--stride", "11")
    assert row["bad"] == 0
    assert row["points"].keys() >= {"kill", "ENOSPC", "EIO", "power", "order", "store tears"}


@pytest.mark.slow
def test_a_snapshot_in_parts_is_read_back_in_little_memory_and_each_flipped_bit_is_found() -> None:
    sizes = ["--bytes", "20e6", "--part_bytes", "4000000", "--s3_bytes", "0", "--tensors", "12"]
    row = last_row("benchmarks/snapshot_parts.py", *sizes, "--max_memory_mb", "80")
    assert (row["files"], row["flips_found"], row["equal"]) == (6, 6, True)
    assert row["largest_file"] <= 4_000_000


@pytest.mark.slow
def test_no_damage_loads_silently() -> None:
    row = last_row("benchmarks/damage.py", "--flips", "40")
    assert row["loaded_silently"] == 0 and row["intact_one_loads"]


@pytest.mark.slow
def test_hostile_snapshots_end_in_a_sentence_and_take_no_memory() -> None:
    """A part of the kinds; an older snapshot is there."""
    kinds = [
        "a zip of torch.save",
        "huge shape",
        "model: NaN",
        "manifest: 4 MB of small",
        "n_layer is",
        "block_size is",
    ]
    programs = ["--programs", "train", "sample", "init", "--older", "yes"]
    row = last_row("benchmarks/hostile.py", "--slack_mb", "16", *programs, "--kinds", *kinds)
    assert row["bad"] == 0 and row["kinds"] >= len(kinds)
