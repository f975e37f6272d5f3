"""trainer.compile in whole jobs."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, changed_program, command, final_hash, manifest, wait_until
from support.jobs import is_alive

from mingpt.tools.jobs import torchrun

# This compiler waits until the test lets it go on, at most for a minute.
SLOW_COMPILER = """#!/bin/sh
touch {folder}/called
n=0
while [ ! -e {folder}/go ] && [ $n -lt 600 ]; do sleep 0.1; n=$((n + 1)); done
exec c++ "$@"
"""


def slow_compiler(folder: Path) -> Path:
    path = folder / "slow-g++"  # torch tells compilers apart by their names
    path.write_text(SLOW_COMPILER.format(folder=folder))
    path.chmod(0o755)
    return path


@pytest.mark.weekly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_compiled_model_trains_to_the_same_bits_for_all_strategies_and_numbers_of_workers(
    arch: str, start: Start, finish: Finish, text: Path, tmp_path: Path
) -> None:
    """A worker of one job dies while the other compiles; the other notices that before it has compiled."""
    settings: dict[str, Any] = {"data__path": text, "trainer__compile": True, "model__dropout": 0.2}
    settings |= {"trainer__max_steps": 4, "model__arch": arch, "trainer__dtype": "bfloat16"}
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(slow_compiler(tmp_path))}
    two = start(command(launcher=torchrun(2, restarts=1), run_dir=tmp_path / "2", **settings), **env)
    two.wait_until((tmp_path / "called").exists)
    compiling, idle = two.workers()
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not is_alive(compiling), timeout_s=20)
    (tmp_path / "go").touch()
    assert two.wait(300) == 0 and "torch.compile failed" not in two.err(), two.err()
    for number, more in ((3, {"trainer__shard_optimizer": True}), (2, {"trainer__parallel": "fsdp"})):
        finish(launcher=torchrun(number), run_dir=tmp_path / "other", env=env, **settings, **more)
        assert final_hash(tmp_path / "2", 4) == final_hash(tmp_path / "other", 4), more
        assert manifest(tmp_path / "other", 4)["software"]["compiled"] == "blocks"
        shutil.rmtree(tmp_path / "other")
    settings |= {"trainer__compile": "auto", "trainer__max_steps": 5, "snapshot__resume": "changed"}
    resumed = finish(run_dir=tmp_path / "2", trainer__workers=1, env=env, **settings)
    assert "compiled: trainer.compile=auto goes on as the snapshot was computed" in resumed.err()
    assert "trainer.compile: True -> auto" not in resumed.err()
    assert manifest(tmp_path / "2", 5)["software"]["compiled"] == "blocks"


ONE_RANK_WITHOUT_COMPILER = """
import os
if os.environ["RANK"] == "1":
    os.environ["CXX"] = "/nowhere/c++"
"""


@pytest.mark.weekly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_blocks_under_fsdp_are_compiled_on_all_workers_or_on_none(finish: Finish, tmp_path: Path) -> None:
    """A compiler that fails on one worker must not leave the others waiting in a forward pass."""
    settings: dict[str, Any] = {"trainer__max_steps": 2, "trainer__parallel": "fsdp", "model__n_layer": 1}
    settings |= {"run_dir": tmp_path / "run", "trainer__compile": True}
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    program = changed_program(tmp_path, ONE_RANK_WITHOUT_COMPILER)
    job = finish(launcher=torchrun(2), program=program, env=env, **settings)
    assert "torch.compile failed" in job.err()
    assert manifest(tmp_path / "run", 2)["software"]["compiled"] is False
