"""How a run ends if its losses are not finite, and what the validation loss is; tests/jobs has whole runs."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.forks import SingleProcess
from support.jobs import SMALL
from torch import Tensor, nn

from mingpt.base.errors import NonFiniteError
from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.training.evaluate import Evaluator
from mingpt.training.saving import Saving
from mingpt.training.state import GROWTH_STEPS, LossScale
from mingpt.training.trainer import Trainer


def make_trainer(
    loss: float, on_nonfinite: str = "stop", loss_scale: LossScale | None = None
) -> tuple[Any, list[str]]:
    trainer, saving, order = Trainer.__new__(Trainer), Saving.__new__(Saving), list[str]()
    known: dict[str, Any] = {
        "config": build(SMALL | {"trainer.on_nonfinite": on_nonfinite}),
        "step_losses": [loss],
        "state": SimpleNamespace(step=4, windows_seen=32, skipped=(0, 0), loss_scale=loss_scale),
        "batches": SimpleNamespace(error=None),
        "context": SingleProcess(),
        "saving": saving,
        "saver": SimpleNamespace(wait=lambda: order.append("written")),
        "start": SimpleNamespace(memory=SimpleNamespace(clear=lambda: order.append("removed"))),
        "run_logger": None,
    }
    vars(trainer).update(known)
    vars(saving).update(known)
    return trainer, order


def test_no_rank_fails_before_the_snapshot_under_way_is_written() -> None:
    """A rank without records may hold rows of that snapshot which the others need."""
    trainer, order = make_trainer(math.nan)
    with pytest.raises(NonFiniteError, match=r"its update is dropped$"):
        trainer.handle_nonfinite(0.0)
    assert order == ["written", "removed"]


GOOD, NAN, GROWN = [1.0] * (GROWTH_STEPS - 1), math.nan, GROWTH_STEPS - 1


@pytest.mark.parametrize(
    ("on_nonfinite", "scale", "norms", "ends", "skipped", "left"),
    [
        ("skip", None, [NAN, 1.0, *[NAN] * 9], False, (10, 9), None),  # ten in a row end the job
        ("skip", None, [NAN, 1.0, *[NAN] * 9, math.inf], True, (10, 9), None),
        ("stop", LossScale(), [*GOOD, math.inf, *GOOD], False, (0, 0), LossScale(32_768.0, GROWN)),
        ("stop", LossScale(), [*GOOD, math.inf, *GOOD, 1.0], False, (0, 0), LossScale(65_536.0, 0)),
        ("stop", LossScale(2.0, 5), [NAN], False, (0, 0), LossScale(1.0, 0)),
        ("stop", LossScale(2.0, 5), [NAN, NAN], True, (0, 0), LossScale(1.0, 0)),
        ("skip", LossScale(2.0, 5), [NAN, NAN], False, (1, 1), LossScale(1.0, 0)),
    ],
)
def test_an_overflow_halves_the_loss_scale_down_to_one_and_then_on_nonfinite_decides(
    on_nonfinite: str,
    scale: LossScale | None,
    norms: list[float],
    ends: bool,
    skipped: tuple[int, int],
    left: LossScale | None,
) -> None:
    trainer, _ = make_trainer(NAN if NAN in norms and scale else 1.0, on_nonfinite, scale and replace(scale))
    with pytest.raises(NonFiniteError) if ends else contextlib.nullcontext():
        for norm in norms:
            trainer.handle_nonfinite(norm)
    assert (trainer.state.skipped, trainer.state.loss_scale) == (skipped, left)


class MeanOfTargets(nn.Module):
    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, targets.double().mean()


@pytest.mark.parametrize(("block_size", "windows"), [(32, None), (3000, None), (32, 40)])
def test_the_loss_is_the_mean_over_all_tokens_of_the_split(block_size: int, windows: int | None) -> None:
    """A shorter window at the end, and batches of unequal size, count by their number of tokens.

    Bits per byte are the loss, in bits, times the tokens of the split, over the bytes of the split.
    """
    settings = {"data.block_size": block_size, "data.val_fraction": 0.5, "trainer.eval_windows": windows}
    config = build(SMALL | settings)
    text = "abcdefghijklmnopqrstuvwxyz" * 700 + "é" * 2400
    corpus = make_corpus(text.encode(), config.data)
    strategy = Mock(weights_are_sharded=False)
    strategy.any.return_value = False
    state: Any = Mock(model=MeanOfTargets(), strategy=strategy)
    context: Any = SingleProcess()
    context.dtype = torch.float32
    run: Any = SimpleNamespace(config=config, context=context, state=state, strategy=strategy, corpus=corpus)
    losses = Evaluator(run).evaluate(0)
    assert isinstance(corpus.val.tokens, Tensor) and losses is not None
    if windows is None:
        assert losses["val/loss"] == pytest.approx(float(corpus.val.tokens[1:].double().mean()), rel=1e-6)
    val_text = text[len(text) // 2 :]
    bits = losses["val/loss"] / math.log(2) * len(val_text) / len(val_text.encode())
    assert losses["val/bits_per_byte"] == pytest.approx(bits, rel=1e-12)
