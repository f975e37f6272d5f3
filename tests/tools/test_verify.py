"""`python -m mingpt verify` passes a run that was only killed, and notices one that differs."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.base.errors import UserError
from mingpt.distributed import Launch
from mingpt.tools import verify
from mingpt.tools.fault_injection import FaultInjector, Kill, marker
from mingpt.tools.verify import PHASES, STEPS, find_problems, make_schedule, train_undisturbed


@pytest.mark.slow
def test_a_run_that_was_only_killed_passes(tmp_path: Path) -> None:
    """A worker is killed inside the reduction, and four go on; the other run is identical all the same."""
    settings = train_undisturbed(tmp_path)
    assert find_problems(1, [Kill("reduction", 9, 0, 4)], 1, tmp_path, settings)[0] == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("", ""),
        ("tensor", r"^step_00000048\.safetensors differs$"),
        ("kill", r"^kills \[0\] hit no living worker$"),
    ],
)
def test_each_way_in_which_the_disturbed_run_can_differ_is_a_problem(
    changed: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = dict(TENSORS)

    def train(folder: Path, *_: object) -> None:
        write(make_store(folder / "run"), make_manifest(STEPS), tensors)

    monkeypatch.setattr(verify, "train", train)
    train(tmp_path / "undisturbed")
    if changed == "tensor":
        tensors["model.wte"] = TENSORS["model.wte"] + 1
    kills = [Kill("forward", 9, 0, 1)] * (changed == "kill")
    problems, _ = find_problems(1, kills, 1, tmp_path, {})
    assert bool(problems) == bool(changed) and re.search(sentence, "; ".join(problems)), problems


def test_a_kill_in_a_save_is_of_the_rank_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kills.json").write_text(json.dumps([Kill("save", 10, 1, 2, "fsdp")]))
    killed = list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr("mingpt.base.events.subscribe", lambda *_: None)
    injector = FaultInjector(tmp_path)
    injector.on_worker_start(Launch(rank=0, world_size=2))
    injector.on_run_start(SimpleNamespace(step=10))
    injector.on_file_progress("step_00000010.safetensors", 60, 100)
    assert killed == [signal.SIGKILL] and marker(tmp_path, 0).exists()


def test_a_schedule_depends_on_its_seed_alone_and_has_every_phase() -> None:
    assert all({kill.phase for kill in make_schedule(seed, 5, [2])} == {*PHASES} for seed in range(20))
    assert make_schedule(3, 5, [1, 2]) == make_schedule(3, 5, [1, 2])
    assert make_schedule(3, 5, [1, 2]) != make_schedule(4, 5, [1, 2])


def test_a_setting_that_verify_needs_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^verify sets trainer\.max_steps itself$"):
        train_undisturbed(tmp_path, ["model.arch=gpt2", "trainer.max_steps=20"])
