"""Jobs on token shards, and on texts with a tokenizer.json."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Start, command, error_of, manifest
from support.jobs import Job, read_metric
from support.prepared import prepared
from support.sampling import sample
from support.shards import write_llmc, write_nanogpt
from support.vocabularies import cl100k_like

from mingpt.data import JsonTokenizer
from mingpt.tools.jobs import torchrun


@pytest.fixture(scope="session")
def shards(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three training shards, one for validation, and their tokenizer."""
    folder = tmp_path_factory.mktemp("shards")
    content = cl100k_like(text.read_text(), 300)
    tokenizer = JsonTokenizer(content)
    assert tokenizer.end_of_text is not None
    tokens = np.append(tokenizer.encode(text.read_text()), tokenizer.end_of_text)
    for number, part in enumerate(np.split(tokens[:-1500], [1000, 3777])):
        write_llmc(folder / f"play_train_{number:06d}.bin", part)
    write_llmc(folder / "play_val_000000.bin", tokens[-1500:])
    (folder / "tokenizer.json").write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def on_shards(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one worker's run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("on_shards")
    job = Job(command(trainer__workers=1, **settings(folder / "run", shards)), folder / "job")
    assert job.wait() == 0, job.err()
    return folder / "run"


def settings(run_dir: Path, data: Path, **more: Any) -> dict[str, Any]:
    return {"run_dir": run_dir, "data__path": data, "trainer__sample_tokens": 20} | more


@pytest.mark.slow
def test_without_a_tokenizer_there_is_no_text(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    write_nanogpt(data / "train.bin", rng.integers(0, 90, 5000))
    write_nanogpt(data / "val.bin", rng.integers(0, 90, 500))
    run_dir = tmp_path / "run"
    job = start(command(trainer__workers=1, data__vocab_size=90, **settings(run_dir, data)))
    assert job.wait() == 0, job.err()
    assert read_metric(run_dir, "val/loss") and not read_metric(run_dir, "val/bits_per_byte")
    refused = sample(run_dir)
    assert refused.returncode == 2 and refused.stderr.startswith("error: the run has no tokenizer, so it has")


def test_sampling_needs_the_snapshot_alone(shards: Path, on_shards: Path) -> None:
    """And nothing says how many bytes of text there are, so there are no bits per byte."""
    assert not read_metric(on_shards, "val/bits_per_byte")
    assert "no bits per byte: no meta.json says" in (on_shards / "log.txt").read_text()
    # Trained weights write a sample, random ones do not.
    expected = r"\d step 0/30  val/loss .*\n.*\d step 1/30 [^@]*\d step 10/30  val/loss .*\n.*\d {5}"
    assert re.search(expected, (on_shards / "log.txt").read_text())
    about = manifest(on_shards, 30)
    assert about["tokenizer"]["kind"] == "json"
    assert list(about["data"]["files"]) == sorted(path.name for path in shards.glob("*.bin"))
    options = ["--prompt", "The king's", "--tokens", "50", "--num_samples", "2"]
    done = sample(on_shards / "snapshots" / "step_00000030.safetensors", *options)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("The king's") == 2


@pytest.mark.weekly
def test_a_tokenizer_from_elsewhere_is_used_and_another_one_is_refused(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """The cases: a text, with two workers and on resume, and shards that were prepared with characters."""
    path, run_dir, data = tmp_path / "tokenizer.json", tmp_path / "run", tmp_path / "data"
    path.write_bytes(cl100k_like(text.read_text(), 300))
    given = settings(run_dir, text, data__tokenizer=path)
    job = start(command(launcher=torchrun(2), **given))
    assert job.wait() == 0, job.err()
    assert "vocabulary of 300" in job.err() and read_metric(run_dir, "val/bits_per_byte")
    path.write_bytes(cl100k_like(text.read_text(), 290))
    prepared(text, "--out", data)
    on_data = settings(tmp_path / "other", data, trainer__max_steps=1)
    for words, expected in (
        (given, f"data.tokenizer={path} is not the tokenizer of this run"),
        (given | {"data__tokenizer": "char"}, "data.tokenizer=char is not the tokenizer of this run"),
        (given | {"data__tokenizer": "bpe", "run_dir": tmp_path / "new"}, "data.tokenizer bpe"),
        (on_data | {"data__tokenizer": path}, "were prepared with another tokenizer"),
        (on_data | {"data__sha256": "a" * 64}, "data.sha256 is for a text"),
    ):
        job = start(command(trainer__workers=1, **words))
        assert expected in error_of(job)
    job = start(command(trainer__workers=1, **on_data))
    assert job.wait() == 0 and read_metric(tmp_path / "other", "val/bits_per_byte"), job.err()
