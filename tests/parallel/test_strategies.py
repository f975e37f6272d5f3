"""All strategies on 1 to 4 ranks with 7 micro-batches, compared with exact sums by ddp on one rank."""

import pytest
import torch
from support.forks import SingleProcess
from support.golden import Golden
from support.odd_models import MODELS
from support.parallel_program import GROUPS, assert_close, assert_equal, assert_same, outcomes_of, whole

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.parallel import STRATEGIES, StrategySetup

# {group: {case: the case that has the same bits on one rank}}
SAME = {
    "ddp": {"exact": "exact", "idle": "idle", "hook": "exact", "hook, modern": "exact, modern"},
    "sharded optimizer": {"exact": "whole", "exact, gpt2": "whole, gpt2", "exact, idle": "whole, idle"},
    "fsdp": {
        "fsdp gpt2 float32": "ddp gpt2 float32",
        "fsdp gpt2 bfloat16": "ddp gpt2 bfloat16",
        "fsdp modern float32": "ddp modern float32",
        "fsdp modern bfloat16": "ddp modern bfloat16",
        "fsdp gpt2 float32, kept": "ddp gpt2 float32",
        "fsdp gpt2 float32, recomputed": "ddp gpt2 float32",
        "fsdp modern bfloat16, recomputed": "ddp modern bfloat16",
        "fsdp gpt2 float32, one unit": "ddp gpt2 float32",
        "fsdp modern bfloat16, one unit": "ddp modern bfloat16",
        "fsdp, idle": "ddp, idle",
        "narrow": "narrow",  # weights gathered in a narrow type: bits of its own
    },
    "own models": {
        "experts, idle": "experts, idle",
        **{f"experts, {case}": "experts, ddp" for case in ("ddp", "sharded", "hook", "fsdp")},
        **{f"unusual, {case}": "unusual, ddp" for case in ("ddp", "sharded", "hook")},
    },
}
# The sums of torch, `trainer.reduction=fast`, in the same form.
CLOSE = {
    "ddp": {"fast": "exact", "idle fast": "idle"},
    "sharded optimizer": {"fast": "whole"},
    "fsdp": {"fsdp gpt2 float32, fast": "ddp gpt2 float32"},
    "own models": {"experts, fast": "experts, ddp", "experts, idle fast": "experts, idle"},
}


def table(of_groups: dict[str, dict[str, str]]) -> pytest.MarkDecorator:
    """The parameters group, case and same of a test. A group of models of users' own is slow."""
    slow = {"own models": pytest.mark.slow}
    rows = [
        pytest.param(group, case, same, marks=slow.get(group, ()))
        for group, cases in of_groups.items()
        for case, same in cases.items()
    ]
    return pytest.mark.parametrize(("group", "case", "same"), rows)


@table(SAME)
def test_any_number_of_ranks_has_the_bits_of_one(group: str, case: str, same: str) -> None:
    """Dropout is on, and a weight without a gradient counts as zeros. `idle` leaves ranks without work.

    `hook` is ExactHook for a loop that keeps DDP. Others save memory or time: weights kept between the
    passes, activations computed again, all weights gathered at once.
    """
    ((expected, *_), *_) = outcomes_of(group, same)
    for outcomes in outcomes_of(group, case):
        assert_same(GROUPS[group][case], outcomes, expected)


@table(CLOSE)
def test_fast_reduction_differs_by_the_order_of_additions_alone(group: str, case: str, same: str) -> None:
    ((expected, *_), *_) = outcomes_of(group, same)
    settings = GROUPS[group][case]
    for outcomes in outcomes_of(group, case):
        gradients = [outcome.gradients for outcome in outcomes]
        assert_close(whole(gradients) if settings.splits else gradients[0], expected.gradients)
        for outcome in outcomes:
            assert outcome.norm == outcomes[0].norm == pytest.approx(expected.norm, rel=1e-4)
            if settings.parallel == "ddp":
                assert_equal(outcome.held, outcomes[0].held)
                assert_close(outcome.held, expected.held)


def test_the_bits_of_fast_reduction_depend_on_the_number_of_ranks() -> None:
    gradients = [outcomes[0].gradients.values() for outcomes in outcomes_of("ddp", "fast")]
    assert len({b"".join(one.numpy().tobytes() for one in of_run) for of_run in gradients}) > 1


def test_gradients_are_large_enough_and_clipped() -> None:
    """Otherwise the comparisons above would show nothing."""
    outcome = outcomes_of("ddp", "exact")[0][0]
    assert max(float(gradient.abs().max()) for gradient in outcome.gradients.values()) > 1e-3
    name = "h.0.attn.c_attn.weight"
    assert outcome.norm > 0.05 and not outcome.clipped[name].equal(outcome.gradients[name])


def test_a_narrow_type_for_gathered_weights_has_bits_of_its_own_and_all_is_held_in_float32() -> None:
    ((narrow, *_), *_), ((usual, *_), *_) = (
        outcomes_of("fsdp", case) for case in ("narrow", "ddp gpt2 float32")
    )
    name = "h.0.mlp.c_fc.weight"
    assert narrow.gradients[name].dtype == narrow.held[name].dtype == torch.float32
    assert not narrow.gradients[name].equal(usual.gradients[name])
    assert narrow.norm == pytest.approx(usual.norm, rel=0.1)


@pytest.mark.slow
def test_a_frozen_weight_is_held_and_neither_updated_nor_given_a_gradient() -> None:
    outcome = outcomes_of("own models", "unusual, ddp")[0][0]
    frozen = outcome.held.keys() - outcome.pieces.keys()
    assert frozen == {name for name in outcome.held if ".frozen." in name} != set()
    assert outcome.gradients.keys() == outcome.pieces.keys()
    assert not outcome.gradients["h.0.mlp.unused"].any()


@pytest.mark.parametrize(("parallel", "is_trained"), [("fsdp", True), ("ddp", False)])
def test_weights_without_dimensions_or_all_frozen_are_one_sentence(
    parallel: str, is_trained: bool, golden: Golden
) -> None:
    with torch.device("meta"):
        model = MODELS["unusual"](ModelConfig(n_layer=1, n_head=2, n_embd=8), vocab_size=5, block_size=4)
    setup = StrategySetup(model.requires_grad_(is_trained), [range(2)], SingleProcess())
    with pytest.raises(UserError) as error:
        STRATEGIES[parallel, "exact"](setup)
    golden(str(error.value))
