"""Experts without tokens, an LSTM, and frozen, unused and 0-dimensional weights, on 1 to 3 ranks."""

from pathlib import Path

import pytest
import torch
from support.odd_models import MODELS
from support.parallel_program import RANKS, Results, assert_close, assert_equal, assert_pieces, run_program
from support.single_process import SingleProcess

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.parallel import STRATEGIES, StrategySetup


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_program(Path(tmp_path_factory.mktemp("own") / "results"), "own models")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("case", "same"),
    [
        ("lstm, ddp", "lstm, ddp"),
        ("experts, idle", "experts, idle"),
        *[(f"experts, {case}", "experts, ddp") for case in ("ddp", "sharded", "hook")],
        *[(f"unusual, {case}", "unusual, ddp") for case in ("ddp", "sharded", "hook")],
    ],
)
def test_a_weight_without_a_gradient_counts_as_zeros_on_any_number_of_ranks(
    results: Results, case: str, same: str, ranks: int
) -> None:
    expected = results[1][0][same]
    for outcomes in results[ranks]:
        assert_equal(outcomes[case].held, expected.held)
        assert (outcomes[case].norm, outcomes[case].eval_loss) == (expected.norm, expected.eval_loss)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_other_strategies_count_it_as_zeros_too(results: Results, ranks: int) -> None:
    for model in ("experts", "lstm"):
        of_ranks = [outcomes[f"{model}, fsdp"] for outcomes in results[ranks]]
        assert_pieces(of_ranks, results[1][0][f"{model}, ddp"])
    for case, same in (("experts, fast", "experts, ddp"), ("experts, idle fast", "experts, idle")):
        for outcomes in results[ranks]:
            assert_close(outcomes[case].held, results[1][0][same].held)


@pytest.mark.slow
def test_a_frozen_weight_is_held_and_neither_updated_nor_given_a_gradient(results: Results) -> None:
    outcome = results[1][0]["unusual, ddp"]
    names = {name for name in outcome.held if ".frozen." in name}
    assert names and names == outcome.held.keys() - outcome.pieces.keys()
    assert outcome.gradients.keys() == outcome.pieces.keys()
    assert not outcome.gradients["h.0.mlp.unused"].any()


def test_fsdp_names_a_weight_without_dimensions() -> None:
    with torch.device("meta"):
        model = MODELS["unusual"](ModelConfig(n_layer=1, n_head=2, n_embd=8), vocab_size=5, block_size=4)
    with pytest.raises(
        UserError, match=r"h\.0\.mlp\.temperature has no dimensions.* set trainer\.parallel=ddp"
    ):
        STRATEGIES["fsdp", "exact"](StrategySetup(model, [range(2)], SingleProcess()))
    with pytest.raises(UserError, match="all parameters of the model are frozen"):
        STRATEGIES["ddp", "exact"](StrategySetup(model.requires_grad_(False), [range(2)], SingleProcess()))
