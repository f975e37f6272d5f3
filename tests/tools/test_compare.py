"""`python -m mingpt compare` says which run is best, where runs begin to differ, and why."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import make_run as make_start
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.config import to_yaml
from mingpt.config.cli import build
from mingpt.report.history import RunHistory
from mingpt.tools.compare import main

Compare = Callable[..., tuple[int, list[str]]]
RECORDED = "on record as different: "


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """A function that compares runs, from an empty folder; returns the exit code and the lines."""
    monkeypatch.chdir(tmp_path)

    def compare(*words: str) -> tuple[int, list[str]]:
        return main(words), capsys.readouterr().out.splitlines()

    return compare


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


def make_records(first: int = 31) -> list[dict[str, float]]:
    """Records of 31 steps; from step `first` on, the gradient's norm is higher."""
    return [
        {"step": step, "train/loss": 2.5, "grad_norm": 2.5 if step < first else 3.0} for step in range(31)
    ]


@pytest.mark.parametrize(
    ("settings", "facts", "finding"),
    [
        ({}, {}, "cannot tell: nothing on record differs"),
        ({"trainer.micro_batch_size": 4}, {}, f"{RECORDED}trainer.micro_batch_size"),
        ({}, {"software": {"threads": 2}}, f"{RECORDED}software.threads"),
        ({"snapshot.every": 5}, {}, f"{RECORDED}snapshot.every"),
        ({"snapshot.every": 5, "seed": 2}, {"tokenizer": "c"}, f"{RECORDED}seed, tokenizer"),
        ({"seed": 2, "trainer.batch_size": 8}, {"changes": [(12, "trainer.batch_size: 16 -> 8")]},
         f"{RECORDED}seed, trainer.batch_size, changes"),
    ],
)  # fmt: skip
def test_what_is_on_record_as_different_is_named(
    settings: dict[str, Any], facts: dict[str, Any], finding: str, tmp_path: Path, compare: Compare
) -> None:
    """Settings that cannot change the result are named only if no other differs."""
    make_run(tmp_path / "a", make_records(), {})
    make_run(tmp_path / "b", make_records(9), settings, **facts)
    code, lines = compare("a", "b")
    assert (code, lines[-1]) == (1, finding), lines
    assert "grad_norm differs from step 9 on: 2.5 and 3" in lines


@pytest.mark.parametrize(
    ("changed", "damage", "finding"),
    [
        ({}, bytes, "the same bits: 0 values, tensors of step 8"),
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
        make_run(tmp_path / name)
        write(make_store(tmp_path / name), make_manifest(8), tensors)
    path = tmp_path / "b" / "snapshots" / "step_00000008.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    code, lines = compare("a", "b")
    assert (code, finding in "\n".join(lines)) == ("same" not in finding, True)
    assert lines[3] == "compare.png is not drawn: no loss is on record"
    assert not (tmp_path / "compare.png").exists()


def test_a_picture_is_drawn_and_a_file_of_the_users_stays(tmp_path: Path, compare: Compare) -> None:
    make_run(tmp_path / "a", make_records())
    (tmp_path / "my.png").write_text("mine")
    compare("a", "a", "--plot", "my.png")
    compare("a", "a")
    assert (tmp_path / "my.png").read_text() == "mine"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
