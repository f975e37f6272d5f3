"""`python -m mingpt compare` says where two runs begin to differ, and why."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import command
from support.jobs import Job
from support.snapshots import TENSORS, make_manifest, make_store, write
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.tools.compare import classify, main

WEIGHT = TENSORS["model.wte"]
LOSSES = [3.0, 2.5, 2.6, 2.0, 2.2, 1.5, 1.8, 1.4]
SETTINGS = {"trainer__max_steps": 12, "trainer__eval_every": 6, "snapshot__every": 6}
RUNS: dict[str, dict[str, Any]] = {
    "one": {"trainer__workers": 1},
    "two": {"trainer__workers": 2},
    "fast": {"trainer__workers": 1, "trainer__reduction": "fast"},
    "four, fast": {"trainer__workers": 4, "trainer__reduction": "fast"},
    "seed": {"trainer__workers": 1, "seed": 2},
    "batch": {"trainer__workers": 4, "trainer__batch_size": 32},
    "window": {"trainer__workers": 1, "data__block_size": 16},
    "micro": {"trainer__workers": 1, "trainer__micro_batch_size": 2},
    "bfloat16": {"trainer__workers": 1, "trainer__dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def train(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that trains a run of RUNS, once, and returns its folder."""

    @functools.cache
    def train_once(name: str) -> Path:
        folder = tmp_path_factory.mktemp("compare")
        settings = SETTINGS | RUNS[name] | {"run_dir": folder / "run", "data__path": text}
        job = Job(command(**settings), folder / "job")
        assert job.wait() == 0, job.err()
        return folder / "run"

    return train_once


def make_run(
    folder: Path, tensors: Mapping[str, Tensor] = TENSORS, losses: Sequence[float] = LOSSES, step: int = 8
) -> str:
    """Make a run folder with a snapshot and a record of each loss."""
    folder.mkdir()
    records = [json.dumps({"step": number, "train/loss": loss}) for number, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*records, '{"step": 9, "tra']))
    write(make_store(folder), make_manifest(step), tensors)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "sentences"),
    [
        ("two", [r"  workers: 1 -> 2", r"the same bits: \d+ values, \d+ tensors"]),
        ("seed", [r"\* seed: 1337 -> 2", "another order of samples: seed, audit"]),
        ("batch", [r"\* trainer.batch_size: 8 -> 32", "another computation: trainer.batch_size"]),
        ("window", [r"train/loss first differs at step 1: .*", "another computation: data.block_size"]),
        ("micro", [r"\* trainer.micro_batch_size: 1 -> 2", "rounding: trainer.micro_batch_size, audit"]),
        ("bfloat16", ["step 12: .* tensors differ, .*", "rounding: trainer.dtype, software.dtype"]),
        ("four, fast", [r"grad_norm first differs at step \d: .* units .*", "rounding: workers"]),
    ],
)
def test_the_cause_of_a_difference_is_named(
    other: str, sentences: list[str], train: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one = train("fast" if "fast" in other else "one")
    assert main([str(one), str(train(other))]) == (0 if other == "two" else 1)
    lines = capsys.readouterr().out.splitlines()
    found = [any(re.fullmatch(sentence, line) for line in lines) for sentence in sentences]
    assert all(found) and re.fullmatch(sentences[-1], lines[-1]), lines


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "the same bits: 8 values, 3 tensors"),
        (
            {
                "model.wte": (WEIGHT.view(torch.int32) ^ (torch.arange(12).view(3, 4) == 5)).view(
                    torch.float32
                )
            },
            "step 8: 1 of 3 tensors differ, the first one is model.wte from its byte 20 on; by 4.77e-07 at "
            "most, in model.wte at [1, 1]\ntoo few losses differ to say what they look like; the metadata "
            "cannot explain it: the program was changed, or a machine computed wrongly, which "
            "trainer.replay_every checks",
        ),
        (
            {"optimizer.wte.step": torch.tensor(2.0)},
            "step from its byte 2 on; by 1 at most, in optimizer.wte.step at []",
        ),
        ({"model.half": torch.ones(4), "new": WEIGHT}, "or of another shape or type: model.half, new\n"),
    ],
)
def test_tensors_are_compared_byte_by_byte(
    changed: dict[str, Tensor], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", TENSORS | changed)]
    assert main(runs) == (1 if changed else 0)
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gaps", "kind"),
    [
        ([0.0] * 6 + [1e-7] * 2, None),
        ([1e-7, -1e-6, 1e-5, 1e-5, 1e-4, 1e-4, 0.5, 0.5], "rounding"),
        ([0.3, -0.4, 0.2, -0.1, 0.3, -0.3, 0.1, -0.1], "another order of samples"),
        ([0.3, 0.4, 0.2, 0.3, 0.3, 0.3, 0.4, 0.2], "another computation"),
    ],
)
def test_curves_tell_what_metadata_do_not(
    gaps: list[float], kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [loss + gap for loss, gap in zip(LOSSES, gaps, strict=True)]
    assert classify(list(zip(LOSSES, losses, strict=True))) == kind
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", losses=losses)]
    assert main([f"{run}/metrics.jsonl" for run in runs]) == 1
    said = f"differ like {kind}" if kind else "too few losses differ to say what they look like"
    assert capsys.readouterr().out.endswith(f"{said}\n")


def test_a_run_that_cannot_be_compared_is_refused_in_one_sentence(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", losses=[], step=7)
    with pytest.raises(UserError, match="none is not there: give a run folder such as out/default"):
        main([one, str(tmp_path / "none")])
    with pytest.raises(UserError, match="have neither a record nor a snapshot of the same step"):
        main([one, other])
    with pytest.raises(UserError, match=r"cannot be compared: .*Is a directory"):
        (tmp_path / "b" / "metrics.jsonl").unlink()
        (tmp_path / "b" / "metrics.jsonl").mkdir()
        main([one, other])


def test_a_damaged_snapshot_is_used_if_it_can_be_opened_and_otherwise_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    path = tmp_path / "b" / "snapshots" / "step_00000008.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main([one, other]) == 1
    assert "the first one is model.half from its byte 9 on" in capsys.readouterr().out
    path.write_bytes(content[:9])
    assert main([one, other]) == 0
    assert capsys.readouterr().out == "the same bits: 8 values, 0 tensors\n"
    assert caplog.text.count("the snapshot of step 8 of ") == 2
