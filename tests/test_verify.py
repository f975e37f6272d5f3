from pathlib import Path

import pytest

from mingpt.config import Config
from mingpt.verify import Kill, Outcome, prepare_work, problems, schedule


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config, Outcome]:
    work = tmp_path_factory.mktemp("verify")
    return work, *prepare_work(work)


@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize(
    ("spoil", "sentence"), [("", ""), ("window", "were fed other tokens"), ("sum", "the final tensors differ"), ("byte", "its manifest says")]
)
def test_what_is_spoiled_on_purpose_is_noticed(spoil: str, sentence: str, prepared: tuple[Path, Config, Outcome]) -> None:
    """One worker killed inside the reduction; the unspoiled run is identical all the same."""
    work, config, reference = prepared
    wrong, _ = problems(1, [Kill("reduction", 9, 0, 1)], [1], work, reference, config, spoil)
    assert (sentence in "; ".join(wrong)) if spoil else wrong == []


def test_a_schedule_depends_on_its_seed_alone() -> None:
    assert schedule(3, 5, [1, 2]) == schedule(3, 5, [1, 2]) != schedule(4, 5, [1, 2])
    assert all(len({kill.step for kill in schedule(seed, 5, [1])}) == 5 for seed in range(50))
