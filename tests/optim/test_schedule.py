from itertools import pairwise

import pytest

from mingpt.config import OptimizerConfig
from mingpt.optim.optimizer import SCHEDULES, learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_and_falls_between_the_values_of_the_configuration(schedule: str) -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=10,
        min_lr_fraction=0.1,
        schedule=schedule,  # type: ignore[arg-type]
    )
    rates = [learning_rate(step, config, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert max(rates) == rates[10] < 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55, abs=1e-9)  # half-way, where both schedules meet


def test_the_linear_schedule_falls_by_the_same_amount_at_each_step() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, min_lr_fraction=0.2, schedule="linear")
    rates = [learning_rate(step, config, 8) for step in range(1, 9)]
    assert rates == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])


def test_the_cosine_schedule_falls_most_slowly_at_both_ends() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, min_lr_fraction=0.0)
    rates = [learning_rate(step, config, 8) for step in range(1, 9)]
    falls = [before - after for before, after in pairwise(rates)]
    assert falls.index(max(falls)) in (2, 3)
    assert falls[-1] == min(falls)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 5), (5, 5), (5, 100)])
def test_no_length_of_run_upsets_the_schedule(schedule: str, max_steps: int, warmup: int) -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=warmup,
        schedule=schedule,  # type: ignore[arg-type]
    )
    for step in range(1, max_steps + 1):
        assert 0 < learning_rate(step, config, max_steps) <= 1 or step == max_steps
