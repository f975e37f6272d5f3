"""The validation loss is a mean over tokens, however they are split into batches."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import SMALL
from support.single_process import SingleProcess
from torch import Tensor, nn

from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.training.evaluate import Evaluator


class MeanOfTargets(nn.Module):
    """A model whose loss differs from batch to batch."""

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
    assert isinstance(corpus.val.tokens, Tensor)
    targets = corpus.val.tokens[1:].double()
    assert losses is not None
    if windows is None:
        assert losses["val/loss"] == pytest.approx(float(targets.mean()), rel=1e-6)
    val_text = text[len(text) // 2 :]
    bits = losses["val/loss"] / math.log(2) * len(val_text) / len(val_text.encode())
    assert losses["val/bits_per_byte"] == pytest.approx(bits, rel=1e-12)
