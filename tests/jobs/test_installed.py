"""What `pip install .` installs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import ROOT, Start, command


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
