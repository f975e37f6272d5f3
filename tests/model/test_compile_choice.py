"""trainer.compile=auto compiles if the planned steps save at least twice the time of the compilation."""

from typing import Any

import pytest

from mingpt.base.errors import UserError
from mingpt.config.cli import build
from mingpt.model.compile import COSTS, PAID_BACK, CompileChoice, choose_compile

SHAKESPEARE: dict[str, Any] = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "data.block_size": 256,
    "trainer.batch_size": 64, "trainer.micro_batch_size": 8,
}  # fmt: skip
NANOGPT_CPU: dict[str, Any] = {
    "model.arch": "gpt2", "model.n_layer": 4, "model.n_head": 4, "model.n_embd": 128, "data.block_size": 64,
    "trainer.batch_size": 12, "trainer.micro_batch_size": 6,
}  # fmt: skip


def choice_of(settings: dict[str, Any], kind: str = "cpu", recorded: bool | None = None) -> CompileChoice:
    """The choice for about the FLOPs per token of SHAKESPEARE's model, or else the others'."""
    config = build(settings)
    return choose_compile(config, 7e7 if config.model.n_layer == 6 else 5e6, kind, recorded)


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({}, "cpu", False),  # the default run takes about a minute
        ({}, "cuda", False),
        ({"trainer.max_steps": 0}, "cpu", False),
        ({"trainer.max_steps": 100_000}, "cpu", True),
        (NANOGPT_CPU | {"trainer.max_steps": 2_000}, "cpu", False),
        (NANOGPT_CPU | {"trainer.max_steps": 200_000}, "cpu", True),
        (SHAKESPEARE | {"trainer.max_steps": 20}, "cpu", False),
        (SHAKESPEARE | {"trainer.max_steps": 5_000}, "cpu", True),  # takes hours
        (SHAKESPEARE | {"trainer.max_steps": 5_000}, "cuda", False),  # takes half a minute
        (SHAKESPEARE | {"trainer.max_steps": 5_000}, "mps", False),
        (SHAKESPEARE | {"trainer.max_steps": 5_000, "trainer.recompute": "block"}, "cpu", False),
        (SHAKESPEARE | {"trainer.max_steps": 5_000, "trainer.compile": False}, "cpu", False),
        ({"trainer.compile": True}, "cpu", True),
        ({"trainer.compile": True}, "mps", True),
    ],
)
def test_a_long_run_is_compiled_and_a_short_one_is_not(
    settings: dict[str, Any], kind: str, expected: bool
) -> None:
    assert choice_of(settings, kind).is_compiled is expected


@pytest.mark.parametrize("kind", COSTS)
def test_the_planned_work_pays_for_the_compilation_twice_and_not_less(kind: str) -> None:
    """The fewest steps with which a run is compiled follow from the definition."""
    costs, per_token = COSTS[kind], 7e7
    saved_per_step_s = costs.saved_share * per_token * 64 * 256 / costs.flops_per_s
    fewest = -int(-PAID_BACK * (costs.start_s + 6 * costs.block_s) // saved_per_step_s)
    for steps, expected in ((fewest - 1, False), (fewest, True)):
        longer = build(SHAKESPEARE | {"trainer.max_steps": steps})
        assert choose_compile(longer, per_token, kind).is_compiled is expected


@pytest.mark.parametrize(
    "other",
    [
        {"trainer.workers": 8},
        {"trainer.parallel": "fsdp"},
        {"trainer.shard_optimizer": True},
        {"trainer.micro_batch_size": 4},
        {"trainer.threads": 4},
    ],
)
def test_the_choice_does_not_depend_on_who_computes(other: dict[str, Any]) -> None:
    for steps in ({"trainer.max_steps": count} for count in (20, 150, 250, 5_000)):
        assert choice_of(SHAKESPEARE | steps) == choice_of(SHAKESPEARE | steps | other)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("steps", [1, 10**8])
def test_a_resumed_run_goes_on_as_its_snapshot_was_computed(recorded: bool, steps: int) -> None:
    choice = choice_of({"trainer.max_steps": steps}, recorded=recorded)
    assert choice.is_compiled is recorded and choice.reason.endswith("as the snapshot was computed")


def test_a_compiled_run_cannot_go_on_with_recomputation_unless_it_is_told_to_leave_the_compiler() -> None:
    with pytest.raises(UserError, match="set it back to none, or go on without the compiler"):
        choice_of({"trainer.recompute": "block"}, recorded=True)
    assert not choice_of({"trainer.recompute": "block", "trainer.compile": False}, recorded=True).is_compiled


@pytest.mark.parametrize(
    ("steps", "words", "saved"), [(340, "not compiled", "3"), (10**5, "compiled", "819")]
)
def test_the_reason_has_the_figures(steps: int, words: str, saved: str) -> None:
    said = f"{words}: on a fast machine, compiling would take about 26 s and save about {saved} s"
    assert str(choice_of({"trainer.max_steps": steps})) == said
