"""How a run ends if its losses are not finite; tests/jobs has whole runs."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SMALL
from support.single_process import SingleProcess

from mingpt.base.errors import NonFiniteError, UserError
from mingpt.config.cli import build
from mingpt.training.saving import Saving
from mingpt.training.state import GROWTH_STEPS, LossScale
from mingpt.training.trainer import Trainer


def make_trainer(order: list[str], losses: list[float], **settings: str) -> Any:
    """A Trainer at step 4, without a snapshot; it appends what it does to `order`."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config, trainer.step_losses = build({**SMALL, **settings}), losses
    trainer.state = SimpleNamespace(step=4, windows_seen=32, skipped=(0, 0), loss_scale=None)
    trainer.context, trainer.batches = SingleProcess(), SimpleNamespace(error=None)
    saving: Any = Saving.__new__(Saving)
    saving.context, saving.saver = trainer.context, SimpleNamespace(wait=lambda: order.append("written"))
    saving.start = SimpleNamespace(memory=SimpleNamespace(clear=lambda: order.append("removed")))
    trainer.saving = saving
    trainer.run_logger = None
    return trainer


@pytest.mark.parametrize("has_run_logger", [False, True])
def test_no_rank_fails_before_the_snapshot_under_way_is_written(has_run_logger: bool) -> None:
    """A rank without records may hold rows of that snapshot which the others need."""
    order: list[str] = []
    trainer = make_trainer(order, [math.nan])
    if has_run_logger:
        trainer.run_logger = SimpleNamespace(failed=lambda step, why: order.append("recorded"))
    with pytest.raises(NonFiniteError, match=r"its update is dropped$"):
        trainer.handle_nonfinite(0.0)
    assert order == [*(["recorded"] if has_run_logger else []), "written", "removed"]


def test_ten_updates_that_are_skipped_one_after_the_other_end_the_job() -> None:
    trainer = make_trainer([], [1.0], **{"trainer.on_nonfinite": "skip"})
    for grad_norm in (math.nan, 1.0, *[math.nan] * 9):
        trainer.handle_nonfinite(grad_norm)
    assert trainer.state.skipped == (10, 9)
    with pytest.raises(NonFiniteError):
        trainer.handle_nonfinite(math.inf)


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_many_good_steps() -> None:
    trainer, found, good = make_trainer([], [1.0]), [], [1.0] * (GROWTH_STEPS - 1)
    trainer.state.loss_scale = LossScale()
    for grad_norm in [*good, math.inf, *good, 1.0]:
        trainer.handle_nonfinite(grad_norm)
        found.append(dataclasses.replace(trainer.state.loss_scale))
    assert found[-2:] == [LossScale(32_768.0, GROWTH_STEPS - 1), LossScale(65_536.0, 0)]


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_on_nonfinite_decides_once_the_loss_scale_is_one(on_nonfinite: str) -> None:
    trainer = make_trainer([], [math.nan], **{"trainer.on_nonfinite": on_nonfinite})
    trainer.state.loss_scale = LossScale(2.0, 5)
    trainer.handle_nonfinite(math.nan)
    assert (trainer.state.loss_scale, trainer.state.skipped) == (LossScale(1.0, 0), (0, 0))
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError):
            trainer.handle_nonfinite(math.nan)
    else:
        trainer.handle_nonfinite(math.nan)
        assert trainer.state.skipped == (1, 1)


def test_data_that_cannot_be_read_end_the_job_under_float16_too() -> None:
    trainer = make_trainer([], [math.nan])
    trainer.state.loss_scale, trainer.batches.error = LossScale(), "the shard is gone"
    with pytest.raises(UserError, match="the shard is gone"):
        trainer.handle_nonfinite(math.nan)
