"""`python -m mingpt verify` passes a run that was only killed, and notices one that was sabotaged."""

import re
from pathlib import Path

import pytest

from mingpt.config import Config
from mingpt.tools.fault_injection import Kill
from mingpt.tools.verify import PHASES, find_problems, make_schedule, train_undisturbed


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    work = tmp_path_factory.mktemp("verify")
    return work, train_undisturbed(work)


@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize(
    ("sabotage", "sentence"),
    [
        ("", ""),
        pytest.param("sum", r"^grad_norm first differs at step 4[1-8]: ", marks=pytest.mark.slow),
        pytest.param(
            "window",
            r"train/loss first differs at step 41: .*; the workers were fed other tokens",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "byte",
            r"^step 48: 1 of \d+ tensors differ, the first one is model\.\S+ from its byte \d+ on; by ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_sabotaged_on_purpose_is_noticed(
    sabotage: str, sentence: str, prepared: tuple[Path, Config]
) -> None:
    """One worker is killed inside the reduction; the other run is identical all the same."""
    work, config = prepared
    kills = [Kill("reduction", 9, 0, 1)]
    problems, _ = find_problems(1, kills, 1, work, config, sabotage)
    assert bool(problems) == bool(sabotage) and re.search(sentence, "; ".join(problems)), problems


def test_a_schedule_depends_on_its_seed_alone_and_has_every_phase() -> None:
    assert all({kill.phase for kill in make_schedule(seed, 5, [2])} == {*PHASES} for seed in range(20))
    assert make_schedule(3, 5, [1, 2]) == make_schedule(3, 5, [1, 2])
    assert make_schedule(3, 5, [1, 2]) != make_schedule(4, 5, [1, 2])
