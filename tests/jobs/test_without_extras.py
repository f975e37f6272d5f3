"""A copy of the program without the modules of mingpt/extras/ trains as the whole program does."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Finish
from support.jobs import read_metric


@pytest.fixture(scope="module")
def bare_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The train.py of a copy without extras; Python searches the folder of a script before all others."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("train.py", "gpt2_train_cfg.yaml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "mingpt", folder / "mingpt", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "mingpt" / "extras").glob("*.py"):
        if path.name != "__init__.py":  # without it, an editable install finds the package in the checkout
            path.unlink()
    return folder / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_without_extras_two_workers_reach_the_same_loss(
    parallel: str, bare_program: Path, finish: Finish, tmp_path: Path
) -> None:
    """The log of the copy names what is missing, which also shows that its own mingpt/ has run."""
    losses, lines = [], []
    for program in (ROOT / "train.py", bare_program):
        run_dir = tmp_path / program.parent.name
        finish(program=program, run_dir=run_dir, trainer__workers=2, trainer__parallel=parallel)
        losses.append(read_metric(run_dir, "val/loss")[30])
        log = (run_dir / "log.txt").read_text()
        assert "Traceback" not in log
        lines.append([line for line in log.splitlines() if "this copy of the program lacks" in line])
    assert losses[1] == pytest.approx(losses[0], abs=0.002)
    assert lines[0] == [] and len(lines[1]) == 1
    assert "going on without " in lines[1][0] and "mingpt.extras.shared_memory" in lines[1][0]
