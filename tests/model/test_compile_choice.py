"""trainer.compile=auto compiles runs with at least COMPILE_FLOPS planned FLOPs."""

from typing import Any

import pytest

from mingpt.base.errors import UserError
from mingpt.config.cli import build
from mingpt.model.compile import COMPILE_FLOPS, choose_compile

SHAKESPEARE: dict[str, Any] = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "data.block_size": 256,
    "trainer.batch_size": 64, "trainer.micro_batch_size": 8,
}  # fmt: skip
FLOPS_PER_TOKEN = 7e7  # about those of SHAKESPEARE


def choice_of(settings: dict[str, Any], kind: str = "cpu", recorded: bool | None = None) -> tuple[bool, str]:
    return choose_compile(build(SHAKESPEARE | settings), FLOPS_PER_TOKEN, kind, recorded)


@pytest.mark.parametrize("kind", COMPILE_FLOPS)
def test_a_long_run_is_compiled_and_a_short_one_is_not(kind: str) -> None:
    fewest = -int(-COMPILE_FLOPS[kind] // (256 * 64 * FLOPS_PER_TOKEN))
    for steps in (0, 1, fewest - 1, fewest, 10 * fewest):
        is_compiled, reason = choice_of({"trainer.max_steps": steps}, kind)
        assert is_compiled is (steps >= fewest)
        assert f"auto compiles from {COMPILE_FLOPS[kind]:.1e}" in reason


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"trainer.max_steps": 10**6}, "mps", False),
        ({"trainer.max_steps": 10**6, "trainer.recompute": "block"}, "cpu", False),
        ({"trainer.max_steps": 10**6, "trainer.compile": False}, "cpu", False),
        ({"trainer.max_steps": 1, "trainer.compile": True}, "mps", True),
    ],
)
def test_settings_and_devices_for_which_the_length_does_not_count(
    settings: dict[str, Any], kind: str, expected: bool
) -> None:
    assert choice_of(settings, kind)[0] is expected


def test_the_choice_does_not_depend_on_who_computes() -> None:
    other = {"trainer.workers": 8, "trainer.parallel": "fsdp", "trainer.micro_batch_size": 4}
    for steps in ({"trainer.max_steps": count} for count in (20, 5_000)):
        assert choice_of(steps) == choice_of(steps | other)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("steps", [1, 10**8])
def test_a_resumed_run_goes_on_as_its_snapshot_was_computed(recorded: bool, steps: int) -> None:
    is_compiled, reason = choice_of({"trainer.max_steps": steps}, recorded=recorded)
    assert is_compiled is recorded and reason.endswith("as the snapshot was computed")


def test_a_compiled_run_cannot_go_on_with_recomputation_unless_it_is_told_to_leave_the_compiler() -> None:
    with pytest.raises(UserError, match="set it back to none, or go on without the compiler"):
        choice_of({"trainer.recompute": "block"}, recorded=True)
    assert not choice_of({"trainer.recompute": "block", "trainer.compile": False}, recorded=True)[0]
