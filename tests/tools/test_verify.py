"""`python -m mingpt verify` passes a run that was only killed, and notices one that was sabotaged."""

import re
from pathlib import Path

import pytest
from support.snapshots import make_manifest, make_store, write

from mingpt.config import Config
from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.tools import verify
from mingpt.tools.fault_injection import STEPS, Kill
from mingpt.tools.verify import PHASES, find_problems, make_schedule, train_undisturbed
from mingpt.training.audit import recompute


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    work = tmp_path_factory.mktemp("verify")
    return work, train_undisturbed(work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "sentence"),
    [
        ("", ""),
        ("sum", r"^grad_norm first differs at step 4[1-8]: "),
        ("window", r"train/loss first differs at step 41: .*; the workers were fed other tokens"),
        ("byte", r"^step 48: 1 of \d+ tensors differ, the first one is model\.\S+ from its byte \d+ on; by "),
    ],
)
def test_what_is_sabotaged_on_purpose_is_noticed(
    sabotage: str, sentence: str, prepared: tuple[Path, Config]
) -> None:
    """A worker is killed inside the reduction, and four go on; the other run is identical all the same."""
    work, config = prepared
    kills = [Kill("reduction", 9, 0, 4)]
    problems, _ = find_problems(1, kills, 1, work, config, sabotage)
    assert bool(problems) == bool(sabotage) and re.search(sentence, "; ".join(problems)), problems


def test_the_same_tensors_pass_unless_the_workers_were_fed_other_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build(verify.SETTINGS | {"data.path": str(text)})
    tokens = make_corpus(text.read_bytes(), config.data).train
    manifest = make_manifest(STEPS) | {"audit": recompute(config, tokens, STEPS)}
    monkeypatch.setattr(verify, "train", lambda folder, *_: write(make_store(folder / "run"), manifest))
    verify.train(tmp_path / "undisturbed", 1, [], {})
    assert find_problems(1, [], 1, tmp_path, config)[0] == []
    manifest["audit"] = "0" * 64
    (problem,) = find_problems(1, [], 1, tmp_path, config)[0]
    assert problem == "the workers were fed other tokens than configuration and text determine"


def test_a_schedule_depends_on_its_seed_alone_and_has_every_phase() -> None:
    assert all({kill.phase for kill in make_schedule(seed, 5, [2])} == {*PHASES} for seed in range(20))
    assert make_schedule(3, 5, [1, 2]) == make_schedule(3, 5, [1, 2])
    assert make_schedule(3, 5, [1, 2]) != make_schedule(4, 5, [1, 2])
