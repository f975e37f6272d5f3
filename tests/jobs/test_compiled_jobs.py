"""trainer.compile in whole jobs."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Begin, Finish, final_hash, is_alive, manifest, torchrun, wait_until

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler"),
]
# This compiler waits until the test lets it go on, at most for a minute.
SLOW_COMPILER = """#!/bin/sh
touch {folder}/called
n=0
while [ ! -e {folder}/go ] && [ $n -lt 600 ]; do sleep 0.1; n=$((n + 1)); done
exec c++ "$@"
"""


def test_a_compiled_model_trains_to_the_same_bits_for_all_strategies_and_numbers_of_workers(
    begin: Begin, finish: Finish, tmp_path: Path
) -> None:
    """A worker of one job dies while the other compiles; the other notices that before it has compiled."""
    compiler, two, other = tmp_path / "slow-g++", tmp_path / "2", tmp_path / "other"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    settings: dict[str, Any] = {
        "env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(compiler)},
        "trainer__compile": True,
        "trainer__max_steps": 4,
        "trainer__dtype": "bfloat16",
        "model__dropout": 0.2,
        "model__arch": "modern",
    }
    job = begin(launcher=torchrun(2, restarts=1), run_dir=two, **settings)
    job.wait_until((tmp_path / "called").exists)
    compiling, idle = job.workers()
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not is_alive(compiling), timeout_s=20)
    (tmp_path / "go").touch()
    assert job.wait(300) == 0 and "torch.compile failed" not in job.err(), job.err()
    for number, more in ((3, {"trainer__shard_optimizer": True}), (2, {"trainer__parallel": "fsdp"})):
        finish(launcher=torchrun(number), run_dir=other, **settings, **more)
        assert final_hash(two, 4) == final_hash(other, 4), more
        assert manifest(other, 4)["software"]["compiled"] == "blocks"
        shutil.rmtree(other)
