"""`python -m mingpt verify` passes a run that was only killed, and notices one that was sabotaged."""

from pathlib import Path

import pytest

from mingpt.config import Config
from mingpt.tools.fault_injection import Kill
from mingpt.tools.verify import PHASES, Outcome, find_problems, make_schedule, train_undisturbed


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config, Outcome]:
    work = tmp_path_factory.mktemp("verify")
    config, reference = train_undisturbed(work)
    return work, config, reference


@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize(
    ("sabotage", "sentence"),
    [
        ("", ""),
        pytest.param("sum", "the final tensors differ", marks=pytest.mark.slow),
        pytest.param("window", "were fed other tokens", marks=pytest.mark.slow),
        pytest.param("byte", "the final tensors differ", marks=pytest.mark.slow),
    ],
)
def test_what_is_sabotaged_on_purpose_is_noticed(
    sabotage: str, sentence: str, prepared: tuple[Path, Config, Outcome]
) -> None:
    """One worker is killed inside the reduction; the other run is identical all the same."""
    work, config, reference = prepared
    kills = [Kill("reduction", 9, 0, 1)]
    problems, _ = find_problems(1, kills, [1], work / (sabotage or "nothing"), reference, config, sabotage)
    if sabotage:
        assert sentence in "; ".join(problems)
    else:
        assert problems == []


def test_a_schedule_depends_on_its_seed_alone_and_has_every_phase() -> None:
    assert all({kill.phase for kill in make_schedule(seed, 5, [2])} == {*PHASES} for seed in range(20))
    assert make_schedule(3, 5, [1, 2]) == make_schedule(3, 5, [1, 2])
    assert make_schedule(3, 5, [1, 2]) != make_schedule(4, 5, [1, 2])
