"""Copies of the program: what `pip install .` installs, and a checkout without mingpt/extras/."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import read_metric
from support.small_jobs import Finish, Start, command

from mingpt.tools.jobs import ROOT


@pytest.mark.weekly
def test_what_pip_installs_finds_its_program_configuration_and_text(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """What it requires is that of this environment. pip downloads setuptools, to build the package."""
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "out", "results", "tests")
    checkout, env = shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored), tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "known.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    subprocess.run([env / "bin" / "pip", "install", "--quiet", "--no-deps", checkout], check=True)
    shutil.rmtree(checkout)
    small = command(launcher=[], program="mingpt-train", trainer__workers=2, run_dir="run", data__path=text)
    next_step = "next: python -m mingpt sample out/default --best"
    for words, said in (
        (small, "next: python -m mingpt sample run --best"),
        (["mingpt", "snapshots", "run"], "  valid"),
        (["mingpt", "sample", "run", "--prompt", "T", "--tokens", "0"], "T"),
        (["mingpt-train", "trainer.max_steps=0", "trainer.workers=1"], next_step),
        (["mingpt", "verify", "--kills", "1", "--workers", "1"], " s)"),
    ):
        job = start(["env", "-C", str(tmp_path), str(env / "bin" / words[0]), *words[1:]])
        assert job.wait() == 0 and (job.out() or job.err()).strip().endswith(said), job.err()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_without_extras_two_workers_reach_the_same_loss(
    parallel: str, finish: Finish, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The log of the copy names what is missing, which also shows that its own mingpt/ has run."""
    copy = tmp_path / "copy"  # Python searches the folder of a script before all others
    shutil.copytree(ROOT / "mingpt", copy / "mingpt", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "train.py", ROOT / "gpt2_train_cfg.yaml"):
        shutil.copy(path, copy)
    for path in (copy / "mingpt" / "extras").glob(
        "[!_]*.py"
    ):  # without __init__.py, it would be the checkout's
        path.unlink()
    finish(program=copy / "train.py", trainer__workers=2, trainer__parallel=parallel)
    assert read_metric(run_dir, "val/loss")[30] == pytest.approx(
        read_metric(undisturbed, "val/loss")[30], abs=0.002
    )
    log = (run_dir / "log.txt").read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if "this copy of the program lacks" in line]
    assert "going on without " in line and "mingpt.extras.shared_memory" in line
