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
from mingpt.config import to_yaml
from mingpt.config.cli import build
from mingpt.report.history import GenerationStart, RunHistory
from mingpt.tools.compare import main

WEIGHT = TENSORS["model.wte"]
LOSSES = [3.0, 2.5, 2.6, 2.0, 2.2, 1.5, 1.8, 1.4]
SETTINGS = {"trainer__max_steps": 12, "trainer__eval_every": 6, "snapshot__every": 6}
PROGRAM = (
    "nothing on record explains it: the program was changed, or a machine computed wrongly, which "
    "trainer.replay_every checks"
)
UNKNOWN = (
    "cannot tell why: settings, data and software of both runs are not on record here; give the run folders, "
    "with config.yaml and run.json"
)
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
    write_records(folder, [{"train/loss": loss} for loss in losses])
    write(make_store(folder), make_manifest(step), tensors)
    return str(folder)


def write_records(folder: Path, records: Sequence[Mapping[str, float]]) -> None:
    """Make a run folder with a metrics.jsonl alone, of these records from step 1 on."""
    folder.mkdir()
    lines = [json.dumps({"step": step, **record}) for step, record in enumerate(records, 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "tra']))


def write_facts(folder: Path, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Write a config.yaml of `settings`, else with defaults, and a run.json with `inputs`."""
    (folder / "config.yaml").write_text(to_yaml(build(dict(settings))))
    history = RunHistory(folder, "id", {})
    history.content["inputs"] = {"data": "a", "tokenizer": "b", "software": {"threads": 1}, **inputs}
    history.start_generation(GenerationStart("id", 0, 1, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "sentences"),
    [
        ("two", [r"  workers: 1 -> 2", r"the same bits: \d+ values of 13 steps, \d+ tensors"]),
        ("seed", [r"\* seed: 1337 -> 2", "another computation: seed"]),
        ("batch", [r"\* trainer.batch_size: 8 -> 32", "another computation: trainer.batch_size"]),
        ("window", [r"train/loss first differs at step 1: .*", "another computation: data.block_size"]),
        ("micro", [r"\* trainer.micro_batch_size: 1 -> 2", "rounding: trainer.micro_batch_size"]),
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
        ({}, "the same bits: 8 values of 8 steps, 3 tensors"),
        (
            {
                "model.wte": (WEIGHT.view(torch.int32) ^ (torch.arange(12).view(3, 4) == 5)).view(
                    torch.float32
                )
            },
            "step 8: 1 of 3 tensors differ, the first one is model.wte from its byte 20 on; by 4.77e-07 at "
            f"most, in model.wte at [1, 1]\n{PROGRAM}\n",
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


DROPOUT = {"model.dropout": 0.1}


@pytest.mark.parametrize(
    ("settings", "facts", "grad_norm", "cause"),
    [
        (({}, {}), {}, 1.001, PROGRAM),
        (({}, {"trainer.micro_batch_size": 4}), {}, 1 + 1e-6, "rounding: trainer.micro_batch_size"),
        (
            (DROPOUT, DROPOUT | {"trainer.micro_batch_size": 4}),
            {},
            1.001,
            "another computation: trainer.micro_",
        ),
        (({}, {"trainer.compile": "true"}), {}, 1.001, "rounding: trainer.compile"),
        ((DROPOUT, DROPOUT | {"trainer.compile": "true"}), {}, 1.001, "another computation: trainer.compile"),
        (({}, {}), {"software": {"threads": 2}}, 1.001, "rounding: software.threads"),
        (({}, {"trainer.eval_windows": 4}), {}, 1.0, "another computation: trainer.eval_windows"),
        (({}, {"trainer.max_steps": 60}), {}, 1.0, "another computation: trainer.max_steps"),
        (({}, {"trainer.max_steps": 60}), {}, 1.2, PROGRAM),
        (({}, {"trainer.max_steps": 60}), {"data": "c"}, 1.2, "another computation: data"),
        (({}, {"optimizer.beta2": 0.9}), {"tokenizer": "c"}, 1.2, "another computation: tokenizer"),
        (({}, {"seed": 2, "trainer.threads": 2}), {}, 1.001, "another computation: seed"),
    ],
)
def test_the_cause_follows_from_what_is_on_record_without_a_snapshot(
    settings: tuple[dict[str, Any], dict[str, Any]],
    facts: dict[str, Any],
    grad_norm: float,
    cause: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, given, known, norm in zip(runs, settings, ({}, facts), (1.0, grad_norm), strict=True):
        write_records(run, [{"train/loss": 3.9, "grad_norm": norm}, {"train/loss": float(run == runs[0])}])
        write_facts(run, given, known)
    assert main([str(run) for run in runs]) == 1
    assert cause in capsys.readouterr().out.splitlines()[-1]
    assert main([f"{run}/metrics.jsonl" for run in runs]) == 1
    assert capsys.readouterr().out.endswith(f"{UNKNOWN}\n")


def test_what_one_run_alone_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, losses, step in (("a", [3.0, 2.5, 2.75, 2.875], 4), ("b", [3.0], 1)):
        write_records(tmp_path / name, [{"val/loss": loss} for loss in losses])
        write(make_store(tmp_path / name), make_manifest(step))
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"only {tmp_path}/a has 3 values of steps 2 to 4",
        "no tensors are compared: the runs have no snapshot of the same step",
        "the same bits: 1 values of 1 steps, 0 tensors",
    ]


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
    assert capsys.readouterr().out.endswith("\nthe same bits: 8 values of 8 steps, 0 tensors\n")
    assert caplog.text.count("the snapshot of step 8 of ") == 2
