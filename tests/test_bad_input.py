"""What only the user can put right: one sentence, once, exit code 2, nothing lost; under torchrun the job ends at once."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SMALL, Done, Job, command, environment

Start = Callable[..., Job]


def sentence(done: Done) -> str:
    """The one line that a refused run says."""
    assert done.code == 2 and done.out == "", done
    lines = [line for line in done.err.splitlines() if "set aside" not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    return lines[0].removeprefix("error: ")


@pytest.fixture
def refuse(start: Start, text: Path, tmp_path: Path) -> Callable[..., str]:
    """The sentence with which plain `python train.py` refuses these settings; nothing may have been written."""

    def run(*words: object, **settings: Any) -> str:
        said = sentence(start(command(*words, **{"run_dir": tmp_path / "run", "data__path": text} | settings)).finish())
        assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.stat().st_size]
        return said

    return run


def test_unknown_setting(refuse: Callable[..., str]) -> None:
    assert refuse(model__n_heads=3) == "unknown setting 'model.n_heads'; did you mean 'model.n_head'?"


def test_wrong_type_and_range(refuse: Callable[..., str]) -> None:
    assert refuse(trainer__max_steps="many") == "trainer.max_steps must be a whole number at least 0, not 'many'"
    assert refuse(data__val_fraction=1) == "data.val_fraction must be a number above 0 and below 1, not 1.0"


def test_a_file_that_does_not_parse_or_is_missing(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: {n_layer: 2")
    assert "broken.yaml is not valid YAML" in refuse(tmp_path / "broken.yaml")
    assert refuse("missing.yaml") == "the configuration file missing.yaml cannot be read: No such file or directory"


def test_settings_that_contradict_each_other(refuse: Callable[..., str]) -> None:
    assert refuse(model__n_head=5) == "model.n_embd (32) must be divisible by model.n_head (5)"
    assert refuse(trainer__micro_batch_size=3) == "trainer.batch_size (8) must be divisible by trainer.micro_batch_size (3)"


def test_a_missing_text(refuse: Callable[..., str]) -> None:
    assert refuse(data__path="nowhere.txt") == f"data.path nowhere.txt does not exist (relative paths start at {ROOT})"


def test_a_url_without_its_driver_names_the_package(refuse: Callable[..., str]) -> None:
    pytest.importorskip("fsspec")
    said = refuse(data__path="gcs://bucket/text")
    assert said.startswith("data.path gcs://bucket/text needs a driver that is not installed") and "gcsfs" in said
    assert "gcsfs" in refuse(snapshot__path="gcs://bucket/snapshots")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"abcdefgh" * 5, "has 4 characters, fewer than one window"),
        (b"abc" * 200 + b"\xfe" + b"abc" * 200, "is not UTF-8: byte 0xfe at offset 600"),
    ],
)
def test_a_text_that_cannot_be_used(content: bytes, expected: str, refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    assert expected in refuse(data__path=tmp_path / "text")


def test_a_text_too_short_for_training(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abcdefgh" * 10)
    assert "the training part" in refuse(data__path=tmp_path / "text", data__val_fraction=0.9)


def test_nothing_to_resume_or_to_evaluate(refuse: Callable[..., str]) -> None:
    assert "snapshot.resume=must needs one" in refuse(snapshot__resume="must")
    assert "no valid snapshot" in refuse(trainer__eval_only=True)


def test_a_snapshot_folder_that_cannot_be_written(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refuse(snapshot__path=tmp_path / "file" / "snapshots")
    assert "run_dir" in refuse(run_dir=tmp_path / "file" / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that the test says is missing")
def test_a_device_that_is_not_there(refuse: Callable[..., str]) -> None:
    assert (
        refuse(trainer__device="cuda") == "trainer.device=cuda asks for GPU 0 and this machine has 0: start fewer workers or set trainer.device=cpu"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model__n_layer": 3, "optimizer__learning_rate": 0.5}, "model.n_layer: 2 -> 3; optimizer.learning_rate: 0.007 -> 0.5"),
        ({"snapshot__resume": "never"}, "snapshot.resume=never wants none"),
        ({"data__path": "other"}, "is not the text that the snapshots"),
    ],
)
def test_another_runs_snapshots_are_left_alone(
    settings: dict[str, Any], expected: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    (tmp_path / "other").write_text(text.read_text()[1:])
    if "data__path" in settings:
        settings = {"data__path": tmp_path / "other"}
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert expected in sentence(start(command(**{"run_dir": tmp_path / "run", "data__path": text} | settings)).finish())
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model__n_heads": 3}, "unknown setting 'model.n_heads'"),
        ({"trainer__micro_batch_size": 8}, "2 workers cannot share the 1 micro-batches"),
        ({"data__path": "nowhere.txt"}, "data.path nowhere.txt does not exist"),
    ],
)
def test_under_torchrun_the_sentence_comes_once_and_the_job_ends(
    settings: dict[str, Any], expected: str, start: Start, text: Path, tmp_path: Path
) -> None:
    done = start(command(workers=2, restarts=50, **{"run_dir": tmp_path / "run", "data__path": text} | settings)).finish(60)
    assert done.code != 0 and done.err.count(expected) == 1 and done.err.count("error: ") == 1, done.err


def write(*words: str) -> Done:
    done = subprocess.run([sys.executable, "sample.py", *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_prompt_with_an_unknown_character_names_it(undisturbed: Path) -> None:
    assert sentence(write(str(undisturbed), "--prompt", "The king ☃")).startswith("the character '☃' (U+2603) is not in the vocabulary")


def test_writing_prints_the_prompt_and_the_text_and_nothing_else(undisturbed: Path) -> None:
    one, again, other = (write(str(undisturbed), "--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed", seed) for seed in ("1", "1", "2"))
    assert one.code == 0 and one.err == "" and one.out.startswith("The ") and len(one.out) == 4 + 100 + 1 > SMALL["data.block_size"]  # type: ignore[operator]
    assert one.out == again.out != other.out


def test_writing_without_a_snapshot_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no snapshot in" in sentence(write(str(tmp_path)))
