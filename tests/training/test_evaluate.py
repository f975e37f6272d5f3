"""The validation loss is a mean over tokens, however they are split into batches."""

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


@pytest.mark.parametrize("block_size", [32, 3000])
def test_the_loss_is_the_mean_over_all_tokens_of_the_split(block_size: int) -> None:
    """A shorter window at the end, and batches of unequal size, count by their number of tokens."""
    config = build(SMALL | {"data.block_size": block_size, "data.val_fraction": 0.5})
    corpus = make_corpus(bytes(range(97, 123)) * 700 + b"zzzz" * 600, config.data)
    strategy = Mock(weights_are_sharded=False)
    strategy.any.return_value = False
    state: Any = Mock(model=MeanOfTargets(), strategy=strategy)
    context: Any = SingleProcess()
    context.dtype = torch.float32
    run: Any = SimpleNamespace(config=config, context=context, state=state, strategy=strategy, corpus=corpus)
    losses = Evaluator(run).evaluate(0)
    assert isinstance(corpus.val.tokens, Tensor)
    targets = corpus.val.tokens[1:].double()
    assert losses is not None and losses["val/loss"] == pytest.approx(float(targets.mean()), rel=1e-6)
