"""The parts of benchmarks/gpu.py run on the stand-in for CUDA, and no figure there passes for a GPU's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from support.cuda.run import build, environment

from mingpt.tools.jobs import clean_environment

PROGRAM = [sys.executable, "benchmarks/gpu.py"]
NEEDS_STAND_IN = pytest.mark.skipif(
    torch.version.cuda is None or shutil.which("g++") is None, reason="needs torch built for CUDA, and g++"
)


@pytest.mark.weekly
@NEEDS_STAND_IN
def test_the_parts_of_the_gpu_benchmark_run_on_the_stand_in(tmp_path: Path) -> None:
    build(tmp_path)
    env = clean_environment(**environment(tmp_path, tmp_path, gpus=2))
    words = ["--minutes", "60", "--out", str(tmp_path / "results")]
    done = subprocess.run([*PROGRAM, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["part"] for row in rows} == {
        "machine", "tests", "speed", "recovery", "nanogpt", "large", "snapshots", "sampling"
    }  # fmt: skip
    assert [row for row in rows if row.get("held") is False] == [] and done.returncode == 0, done.stderr[
        -3000:
    ]
    assert {row["on"] for row in rows} == {"stand-in"}
    assert {row.get("tokens_per_s", "-") for row in rows} == {"-"} and not (tmp_path / "results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    done = subprocess.run(PROGRAM, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: torch sees no CUDA GPU here")
