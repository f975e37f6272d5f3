"""`python -m mingpt verify` passes a run that was only killed, and notices one that differs."""

import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.tools import verify
from mingpt.tools.fault_injection import STEPS, FaultInjector, Kill
from mingpt.tools.verify import find_problems
from mingpt.training.run import make_sampler


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("", ""),
        ("tensor", r"^step_00000048\.safetensors differs$"),
        ("kill", r"^kills \[0\] hit no living worker$"),
        ("batch", r"^the workers used other tokens than configuration and text determine$"),
        ("sampler", r"^a window comes twice in an epoch$"),
    ],
)
def test_each_way_in_which_the_disturbed_run_can_differ_is_a_problem(
    changed: str, sentence: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = verify.SETTINGS | {"data.path": str(text)}
    config, tensors = build(settings), dict(TENSORS)
    if changed == "sampler":
        monkeypatch.setattr("mingpt.data.windows.permute", lambda indices, *_: indices // np.uint64(2))
    dataset = make_corpus(text.read_bytes(), config.data).train
    starts = make_sampler(config, dataset, 1, 0, False).window_starts(0, STEPS * 8).tolist()

    def train(folder: Path, *_: object) -> None:
        write(make_store(folder / "run"), make_manifest(STEPS), tensors)
        (folder / "kills.json").write_text("[]")
        injector = FaultInjector(folder)
        for number, start in enumerate(starts):
            injector.on_batch(*divmod(number, 8), *dataset.__getitems__([start]))

    monkeypatch.setattr(verify, "train", train)
    monkeypatch.setattr("mingpt.base.events.subscribe", Mock())
    if changed == "batch":
        starts[9] = starts[8]
    train(tmp_path / "undisturbed")
    if changed == "tensor":
        tensors["model.wte"] = TENSORS["model.wte"] + 1
    kills = [Kill("forward", 9, 0, 1)] * (changed == "kill")
    problems = "; ".join(find_problems(1, kills, 1, tmp_path, settings)[0])
    assert bool(problems) == bool(changed) and re.search(sentence, problems), problems
