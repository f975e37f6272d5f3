"""A run's result depends neither on the number of workers nor on how the state is split: the same bits."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import (
    Begin,
    Finish,
    assert_same_run,
    free_port,
    last_step,
    reached,
    read_history,
    snapshot_steps,
    torchrun,
)


def test_three_workers_have_the_curve_and_the_bits_of_two(
    finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    """By the default rendezvous of torchrun. In test_stopping.py a single worker ends such a run."""
    finish(launcher=torchrun(3, options=[f"--master_port={free_port()}"]))
    assert_same_run(run_dir, undisturbed)


FSDP: dict[str, Any] = {"trainer__parallel": "fsdp"}
SHARDED_OPTIMIZER: dict[str, Any] = {"trainer__shard_optimizer": True}
# A stop is obeyed a step or more later, and the next parts of the run need steps, too.
SLOW_STEPS = 'import time; events.subscribe("step_end", lambda step: time.sleep(0.1))'


@pytest.mark.slow
def test_strategy_and_number_of_workers_change_in_mid_run(
    begin: Begin, undisturbed: Path, run_dir: Path
) -> None:
    """Parts: one worker with the whole state, three with shards, two with optimizer shards, fsdp alone.

    test_restarts.py has killed workers.
    """
    recomputed = FSDP | {"trainer__recompute": "block"}
    parts = [(1, {}), (3, recomputed), (2, SHARDED_OPTIMIZER), (1, FSDP), (2, {})]
    for number, (workers, settings) in enumerate(parts, start=1):
        launcher = [sys.executable] if workers == 1 else torchrun(workers)
        begun_at = last_step(run_dir)
        job = begin(code=SLOW_STEPS, launcher=launcher, trainer__workers=1, **settings)
        if number < len(parts):
            job.wait_until(reached(run_dir, begun_at + 2))
            (run_dir / "STOP").touch()
        assert job.wait() == 0 and "Warning" not in job.err(), job.err()
    ended = read_history(run_dir)["generations"]
    assert [entry["workers"] for entry in ended] == [workers for workers, _ in parts]
    assert [entry["end"] for entry in ended] == ["stopped by STOP"] * 4 + ["finished"]
    assert {entry["to_step"] for entry in ended} <= set(snapshot_steps(run_dir))
    assert_same_run(run_dir, undisturbed)
