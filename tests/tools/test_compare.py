"""`python -m mingpt compare` says which run is best, where runs begin to differ, and why."""

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
from support.runs import make_run as make_start
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.base.errors import UserError
from mingpt.config import to_yaml
from mingpt.config.cli import build
from mingpt.report.history import RunHistory
from mingpt.tools.compare import main

Compare = Callable[..., tuple[int, list[str]]]
ALONE = "cannot tell: settings are not on record, give run folders"
RECORDED = "on record as different: "
# float32 on every CPU: in bfloat16, few steps of so small a model may have equal bits in any order.
SETTINGS: dict[str, Any] = {
    "trainer__max_steps": 12, "trainer__eval_every": 6, "snapshot__every": 6, "trainer__dtype": "float32"
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "one": {"trainer__workers": 1},
    "two": {"trainer__workers": 2},
    "fast": {"trainer__workers": 1, "trainer__reduction": "fast"},
    "four, fast": {"trainer__workers": 4, "trainer__reduction": "fast"},
    "seed": {"trainer__workers": 1, "seed": 2},
    "bfloat16": {"trainer__workers": 1, "trainer__dtype": "bfloat16"},
}


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """A function that compares runs, from an empty folder; returns the exit code and the lines."""
    monkeypatch.chdir(tmp_path)

    def compare(*words: str) -> tuple[int, list[str]]:
        code = main(words)
        return code, capsys.readouterr().out.splitlines()

    return compare


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
    folder: Path,
    records: Sequence[Mapping[str, float]] = (),
    settings: Mapping[str, Any] | None = None,
    changes: Sequence[tuple[int, str]] = (),
    **inputs: Any,
) -> None:
    """Make a run folder without snapshots; `settings` and `inputs` are those that have no default value."""
    folder.mkdir()
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "tra']))
    if settings is not None:
        (folder / "config.yaml").write_text(to_yaml(build(dict(settings))))
        history = RunHistory(folder, "id", {})
        history.content["inputs"] = {"data": "a", "tokenizer": "b", "software": {"threads": 1}, **inputs}
        history.content["changes"] = [{"step": step, "settings": [text]} for step, text in changes]
        history.start_generation(make_start(folder))


def make_records(metric: str = "", step: int = 0, factor: float = 1.0) -> list[dict[str, float]]:
    """Records of an evaluation at step 0 and of 30 steps; from a metric's value on, all have a factor."""
    names = [(0, "val/loss")] + [(at, name) for at in range(1, 31) for name in ("train/loss", "grad_norm")]
    first = names.index((step, metric)) if metric else len(names)
    values = {key: 2.5 * (factor if place >= first else 1) for place, key in enumerate(names)}
    return [
        {"step": at, **{name: values[key] for key in names if key[0] == at for name in key[1:]}}
        for at in range(31)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "finding", "alone"),
    [
        ("one", "two", r"the same bits: \d+ values, tensors of step 12", r"the same bits: \d+ values"),
        ("one", "seed", f"{RECORDED}seed", ALONE),
        ("one", "bfloat16", f"{RECORDED}trainer.dtype, software.dtype", ALONE),
        ("fast", "four, fast", f"{RECORDED}trainer.workers, workers", ALONE),
    ],
)
def test_what_is_on_record_as_different_is_named(
    one: str, other: str, finding: str, alone: str,
    train: Callable[[str], Path], tmp_path: Path, compare: Compare,
) -> None:  # fmt: skip
    """The run folders tell the setting; copies of metrics.jsonl do not."""
    for name, run in (("a", train(one)), ("b", train(other))):
        (tmp_path / name).symlink_to(run)
        (tmp_path / f"{name}.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    for files, expected in ((("a", "b"), finding), (("a.jsonl", "b.jsonl"), alone)):
        code, lines = compare(*files)
        assert code == (0 if other == "two" else 1)
        assert re.fullmatch(expected, lines[-1]), lines


@pytest.mark.parametrize(
    ("settings", "facts", "finding"),
    [
        ({}, {}, "cannot tell: nothing on record differs"),
        ({"trainer.micro_batch_size": 4}, {}, f"{RECORDED}trainer.micro_batch_size"),
        ({}, {"software": {"threads": 2}}, f"{RECORDED}software.threads"),
        ({"trainer.eval_windows": 4}, {}, f"{RECORDED}trainer.eval_windows"),
        ({"snapshot.every": 5}, {}, f"{RECORDED}snapshot.every"),
        ({"snapshot.every": 5, "seed": 2}, {"tokenizer": "c"}, f"{RECORDED}seed, tokenizer"),
        ({"seed": 2, "trainer.batch_size": 8}, {"changes": [(12, "trainer.batch_size: 16 -> 8")]},
         f"{RECORDED}seed, trainer.batch_size, changes"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_change_the_result_is_named_only_without_another(
    settings: dict[str, Any], facts: dict[str, Any], finding: str, tmp_path: Path, compare: Compare
) -> None:
    make_run(tmp_path / "a", make_records(), {})
    make_run(tmp_path / "b", make_records("grad_norm", 9, 1.2), settings, **facts)
    code, lines = compare("a", "b")
    assert (code, lines[-1]) == (1, finding), lines


def test_without_a_common_snapshot_data_and_tokenizer_are_named(tmp_path: Path, compare: Compare) -> None:
    for name, step in (("a", 20), ("b", 26)):
        records = make_records("val/loss", 0, 1.01 if name == "b" else 1.0)[: step + 1]
        make_run(tmp_path / name, records, {"trainer.max_steps": step}, data=name, tokenizer=name)
        write(make_store(tmp_path / name), make_manifest(step))
    code, lines = compare("a", "b")
    assert (code, lines[-3:]) == (
        1,
        [
            "not compared: 12 values, in one run only",
            "not compared: tensors, as no step has a snapshot of both runs",
            f"{RECORDED}trainer.max_steps, data, tokenizer",
        ],
    )
    assert "* trainer.max_steps: 20 -> 26" in lines


@pytest.mark.parametrize(
    ("changed", "damage", "finding"),
    [
        ({}, bytes, "the same bits: 61 values, tensors of step 8"),
        ({"model.wte": TENSORS["model.wte"] * (1 + 2**-23)}, bytes, "step_00000008.safetensors differs"),
        ({"optimizer.wte.step": torch.tensor(0.5)}, bytes, "step_00000008.optimizer.safetensors differs"),
        ({"new": torch.ones(1)}, bytes, "step_00000008.safetensors differs"),
        ({}, lambda content: content[:-1] + bytes(1), "the snapshot of step 8 of b is damaged: its file"),
        ({}, lambda content: content[:9], "the snapshot of step 8 of b is damaged: its file"),
    ],
)  # fmt: skip
def test_tensors_of_the_same_step_are_compared_unless_a_snapshot_is_damaged(
    changed: dict[str, torch.Tensor], damage: Callable[[bytes], bytes], finding: str,
    tmp_path: Path, compare: Compare,
) -> None:  # fmt: skip
    for name, tensors in (("a", TENSORS), ("b", TENSORS | changed)):
        make_run(tmp_path / name, make_records())
        write(make_store(tmp_path / name), make_manifest(8), tensors)
    path = tmp_path / "b" / "snapshots" / "step_00000008.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    code, lines = compare("a", "b")
    assert (code, finding in "\n".join(lines)) == ("same" not in finding, True)


def test_the_first_lines_tell_which_of_several_runs_is_best_and_a_picture_shows_them(
    tmp_path: Path, compare: Compare
) -> None:
    for name, losses in (("a", (2.5, 1.5, 1.75)), ("b", (2.5, 1.5, 1.75)), ("c", (2.5, 1.25, 1.5, 1.125))):
        records = [
            {"step": 10 * number, "val/loss": loss, "val/bits_per_byte": 2 * loss, "tokens": 4000 * number}
            for number, loss in enumerate(losses)
        ]
        make_run(tmp_path / name, records, {} if name == "a" else None)
    code, lines = compare("a", "b", "c")
    assert code == 1
    assert [line.split() for line in lines[:5]] == [
        ["steps", "val/loss", "lowest", "bits/byte", "lowest", "seconds", "tokens", "run"],
        ["20", "1.750", "1.500", "3.500", "3.000", "-", "8,000", "a"],
        ["20", "1.750", "1.500", "3.500", "3.000", "-", "8,000", "b"],
        ["30", "1.125", "1.125", "2.250", "2.250", "-", "12,000", "c"],
        ["losses", "of", "all", "runs:", "compare.png"],
    ]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert lines.index("a and b:") < lines.index("the same bits: 6 values") < lines.index("a and c:")
    assert "val/loss at step 20, the last of both runs: 1.7500 and 1.5000, lower in c" in lines
    make_run(tmp_path / "d", [{"step": 10, "val/loss": 1.25}, {"step": 20, "val/loss": 1.75}])
    assert not any("the last of both runs" in line for line in compare("a", "d")[1])  # they end alike
    reasons = {"none/x.png": "No such file or directory", "compare.png": "", "my.png": "it is no picture of"}
    (tmp_path / "my.png").write_text("mine")
    for picture, reason in reasons.items():
        expected = f"{picture} is not drawn ({reason}" if reason else f"losses of all runs: {picture}"
        assert compare("a", "b", "--plot", picture)[1][3].startswith(expected)
    assert (tmp_path / "my.png").read_text() == "mine"


def test_without_a_loss_on_record_no_picture_is_drawn(tmp_path: Path, compare: Compare) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
        write(make_store(tmp_path / name), make_manifest(8))
    assert compare("a", "b")[1][3] == "compare.png is not drawn: no loss is on record"
    assert not (tmp_path / "compare.png").exists()


def test_a_run_that_cannot_be_compared_is_refused_in_one_sentence(tmp_path: Path, compare: Compare) -> None:
    make_run(tmp_path / "a", make_records())
    make_run(tmp_path / "b")
    with pytest.raises(UserError, match="nowhere is not there: give a run folder such as out/default"):
        compare("a", "nowhere")
    with pytest.raises(UserError, match="a and b have no record and no snapshot of the same step"):
        compare("a", "b")
    (tmp_path / "c" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot be compared: .*Is a directory"):
        compare("a", "c")
