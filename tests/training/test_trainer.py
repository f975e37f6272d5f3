"""How a run ends where its losses are not finite; whole runs are in tests/jobs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SMALL
from support.single_process import SingleProcess

from mingpt.base.errors import NonFiniteError
from mingpt.config.cli import build
from mingpt.training.trainer import Trainer


@pytest.mark.parametrize("has_run_logger", [False, True])
def test_no_rank_fails_before_the_snapshot_under_way_is_written(has_run_logger: bool) -> None:
    """A rank without records may hold rows that the others need for it."""
    order: list[str] = []
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config, trainer.step_losses = build(SMALL), [math.nan]
    trainer.state = SimpleNamespace(step=4, windows_seen=32, skipped=(0, 0))
    trainer.sampler = SimpleNamespace(window_starts=lambda first, count: [0] * count)
    trainer.context, trainer.batches = SingleProcess(), SimpleNamespace(error=None)
    trainer.saving = SimpleNamespace(
        last_save_step=0,
        saver=SimpleNamespace(wait=lambda: order.append("written")),
        remove_memory_snapshots=lambda: order.append("removed"),
    )
    logger = SimpleNamespace(failed=lambda step, why: order.append("recorded"))
    trainer.run_logger = logger if has_run_logger else None
    with pytest.raises(NonFiniteError, match=r"its update is dropped and there is no snapshot yet$"):
        trainer.handle_nonfinite(0.0)
    assert order == ["written", *(["recorded"] if has_run_logger else []), "removed"]


def test_ten_updates_that_are_skipped_one_after_the_other_end_the_job() -> None:
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config, trainer.step_losses = build({**SMALL, "trainer.on_nonfinite": "skip"}), [1.0]
    trainer.state = SimpleNamespace(step=4, windows_seen=32, skipped=(0, 0))
    trainer.context, trainer.batches = SingleProcess(), SimpleNamespace(error=None)
    saver = SimpleNamespace(wait=lambda: None)
    trainer.saving = SimpleNamespace(last_save_step=0, saver=saver, remove_memory_snapshots=lambda: None)
    trainer.run_logger = None
    for grad_norm in (math.nan, 1.0, *[math.nan] * 9):
        trainer.handle_nonfinite(grad_norm)
    assert trainer.state.skipped == (10, 9)
    with pytest.raises(NonFiniteError):
        trainer.handle_nonfinite(math.inf)
