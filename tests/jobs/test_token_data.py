"""Jobs on token shards, and on texts with a tokenizer.json."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, SMALL, Start, changed_program, command, final_hash, manifest, reached
from support.sampling import sample
from support.shards import write_llmc, write_nanogpt
from support.vocabularies import small_bpe

from mingpt.config.cli import build
from mingpt.data import CharDataset, JsonTokenizer
from mingpt.tools.jobs import Job, clean_environment, read_history, read_metric, torchrun
from mingpt.training.audit import make_sampler


@pytest.fixture(scope="session")
def shards(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three training shards, one for validation, and their tokenizer."""
    folder = tmp_path_factory.mktemp("shards")
    content = small_bpe(text.read_text())
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
    """The run folder of one worker that nothing disturbed."""
    folder = tmp_path_factory.mktemp("on_shards")
    job = Job(command(trainer__workers=1, **settings(folder / "run", shards)), folder / "job")
    assert job.wait() == 0, job.err()
    return folder / "run"


def settings(run_dir: Path, data: Path, **more: Any) -> dict[str, Any]:
    return {"run_dir": run_dir, "data__path": data, "trainer__sample_tokens": 20} | more


def error_of(job: Job) -> str:
    """The one sentence with which a job ends."""
    lines = [line for line in job.err().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in job.err(), job.err()
    return lines[0].removeprefix("error: ")


@pytest.mark.slow
def test_shards_give_the_same_bits_on_three_workers_and_after_a_kill(
    start: Start, shards: Path, on_shards: Path, tmp_path: Path
) -> None:
    """It is resumed by two workers, who no longer find the tokenizer that the snapshot brings."""
    copy = shutil.copytree(shards, tmp_path / "shards")
    run_dir = tmp_path / "run"
    job = start(command(launcher=torchrun(3, 0), **settings(run_dir, copy)))
    job.wait_until(reached(run_dir, 12))
    job.kill()
    (copy / "tokenizer.json").unlink()
    job = start(command(launcher=torchrun(2), **settings(run_dir, copy)))
    assert job.wait() == 0, job.err()
    assert [entry["workers"] for entry in read_history(run_dir)["generations"]] == [3, 2]
    assert final_hash(run_dir) == final_hash(on_shards)
    for name in ("train/loss", "val/loss", "val/bits_per_byte"):
        assert read_metric(run_dir, name) == read_metric(on_shards, name)


def test_bits_per_byte_are_nats_over_the_bytes_of_the_text_that_is_predicted(
    shards: Path, on_shards: Path
) -> None:
    tokenizer = JsonTokenizer((shards / "tokenizer.json").read_bytes())
    tokens = np.fromfile(shards / "play_val_000000.bin", dtype="<u2", offset=1024)
    source_bytes = len(tokenizer.decode(tokens[1:].tolist()).encode())
    nats = read_metric(on_shards, "val/loss")[30] * (len(tokens) - 1)
    bits = read_metric(on_shards, "val/bits_per_byte")[30]
    assert math.isclose(bits, nats / math.log(2) / source_bytes, rel_tol=1e-12)


def test_a_snapshot_carries_the_tokenizer_and_sampling_needs_nothing_else(
    shards: Path, on_shards: Path
) -> None:
    about = manifest(on_shards, 30)
    assert (about["vocabulary"], about["tokenizer"]["kind"]) == ("", "json")
    assert list(about["data"]["files"]) == sorted(path.name for path in shards.glob("*.bin"))
    options = ["--prompt", "The king's", "--tokens", "50", "--num_samples", "2"]
    done = sample(on_shards / "snapshots" / "step_00000030.safetensors", *options)
    assert done.returncode == 0 and done.stderr == "", done
    assert done.stdout.count("The king's") == 2


@pytest.mark.slow
def test_without_a_tokenizer_prompts_and_samples_are_tokens(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    write_nanogpt(data / "train.bin", rng.integers(0, 90, 5000))
    write_nanogpt(data / "val.bin", rng.integers(0, 90, 500))
    run_dir = tmp_path / "run"
    job = start(command(trainer__workers=1, data__vocab_size=90, **settings(run_dir, data)))
    assert job.wait() == 0, job.err()
    assert read_metric(run_dir, "val/loss") and not read_metric(run_dir, "val/bits_per_byte")
    assert "no tokenizer" in sample(run_dir).stderr
    done = sample(run_dir, "--prompt_tokens", "5,6 7", "--tokens", "4")
    numbers = [int(word) for word in done.stdout.split(",")]
    assert numbers[:3] == [5, 6, 7] and len(numbers) == 7 and max(numbers) < 90
    refused = sample(run_dir, "--prompt_tokens", "5,90")
    assert refused.returncode == 2 and "must be numbers below 90" in refused.stderr


@pytest.mark.parametrize(
    ("part", "workers"),
    [
        ("val", 2),
        ("train", 1),
        pytest.param("train", 2, marks=pytest.mark.slow),
        pytest.param("val", 1, marks=pytest.mark.slow),
    ],
)
def test_a_token_past_the_vocabulary_ends_the_job_on_all_workers(
    part: str, workers: int, start: Start, tmp_path: Path
) -> None:
    """One worker alone reads it."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, 90, 5000)
    for name, count in (("train", 5000), ("val", 500)):
        part_tokens = tokens[:count].copy()
        part_tokens[count // 2] = 90 if name == part else 0
        write_llmc(data / f"{name}_00000.bin", part_tokens)
    given = settings(tmp_path / "run", data, data__vocab_size=90, trainer__eval_at_start=False)
    given |= {"trainer__max_steps": 200, "trainer__eval_every": 7, "trainer__workers": workers}
    given |= {"snapshot__every": 100, "snapshot__memory_every": 1}
    job = start(command(**given))
    assert job.wait() == 2, job.err()
    number = "2,500" if part == "train" else "250"
    assert error_of(job).startswith(
        f"token {number} of {data}/{part}_00000.bin is 90, and the vocabulary has 90"
    )
    history = read_history(tmp_path / "run")
    assert history["status"] == "failed" and len(history["generations"]) == 1, history
    assert not list(Path(SMALL["snapshot.memory_path"]).glob(f"mingpt-{history['id']}-*"))


def test_a_shard_that_has_changed_is_named_on_resume(
    start: Start, shards: Path, on_shards: Path, tmp_path: Path
) -> None:
    copy, run_dir = shutil.copytree(shards, tmp_path / "shards"), tmp_path / "run"
    shutil.copytree(on_shards, run_dir)
    path = copy / "play_train_000001.bin"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    job = start(command(trainer__workers=1, **settings(run_dir, copy)))
    assert job.wait() == 2
    assert "were trained on other token shards" in error_of(job)
    assert "play_train_000001.bin has changed" in error_of(job)


@pytest.mark.slow
def test_a_text_is_trained_on_with_a_tokenizer_from_elsewhere(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """By two workers; another tokenizer is refused on resume, and the same text by characters, too."""
    path, run_dir = tmp_path / "tokenizer.json", tmp_path / "run"
    path.write_bytes(small_bpe(text.read_text()))
    given = settings(run_dir, text, data__tokenizer=path)
    job = start(command(launcher=torchrun(2), **given))
    assert job.wait() == 0, job.err()
    assert "vocabulary of 300" in job.err() and read_metric(run_dir, "val/bits_per_byte")
    path.write_bytes(small_bpe(text.read_text(), 290))
    for name in (str(path), "char"):
        job = start(command(trainer__workers=1, **(given | {"data__tokenizer": name})))
        assert job.wait() == 2
        assert f"data.tokenizer={name} is another tokenizer" in error_of(job)


@pytest.mark.slow
def test_a_subset_of_validation_is_the_same_for_any_number_of_workers(
    start: Start, shards: Path, tmp_path: Path
) -> None:
    curves = []
    for workers in (1, 3):
        run_dir = tmp_path / str(workers)
        given = settings(run_dir, shards, trainer__eval_windows=7, trainer__max_steps=3)
        job = start(command(launcher=torchrun(workers), **given))
        assert job.wait() == 0, job.err()
        curves.append({name: read_metric(run_dir, name) for name in ("val/loss", "val/bits_per_byte")})
    assert curves[0] == curves[1] and len(curves[0]["val/loss"]) == 2


def test_a_tokenizer_that_is_none_is_one_sentence(start: Start, text: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(json.dumps({"model": 3}))
    for name, expected in (("bpe", "data.tokenizer bpe"), (str(tmp_path / "broken.json"), "cannot be used")):
        job = start(command(trainer__workers=1, **settings(tmp_path / "run", text, data__tokenizer=name)))
        assert job.wait() == 2
        assert expected in error_of(job)


def test_rows_behind_the_tokenizer_are_neither_sampled_nor_data(
    start: Start, text: Path, shards: Path, tmp_path: Path
) -> None:
    """A text with more rows than characters; then shards with a token between the two sizes."""
    padded = {"data__vocab_size": 512, "trainer__workers": 1, "trainer__max_steps": 2}
    job = start(command(**(settings(tmp_path / "text", text) | padded)))
    assert job.wait() == 0, job.err()
    copy = shutil.copytree(shards, tmp_path / "shards")
    write_llmc(copy / "play_val_000000.bin", [5] * 99 + [366] + [5] * 200)
    job = start(command(**(settings(tmp_path / "shards_run", copy) | padded)))
    assert job.wait() == 2
    assert "is 366, and the vocabulary has 300 tokens" in error_of(job)


@pytest.mark.slow
def test_a_token_behind_the_last_step_does_not_matter_to_any_number_of_workers(
    start: Start, tmp_path: Path
) -> None:
    """One that the windows of the fourth step hold, and three steps are trained."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, 90, 5000)
    write_llmc(data / "val_00000.bin", tokens[:500])
    write_llmc(data / "train_00000.bin", tokens)
    given = {"data__vocab_size": 90, "trainer__max_steps": 3, "trainer__workers": 2}
    config = build({"data.block_size": 32, "trainer.batch_size": 8, "trainer.micro_batch_size": 1})
    dataset = CharDataset(tokens.astype(np.uint16), 32)
    starts = make_sampler(config, dataset).window_starts(0, 32)
    tokens[starts[24] + 5] = 90
    assert not any(start <= starts[24] + 5 <= start + 32 for start in starts[:24])
    write_llmc(data / "train_00000.bin", tokens)
    job = start(command(**settings(tmp_path / "run", data, **given)))
    assert job.wait() == 0, job.err()
    job = start(command(**settings(tmp_path / "more", data, **(given | {"trainer__max_steps": 4}))))
    assert job.wait() == 2 and max(read_metric(tmp_path / "more")) == 3


def test_an_evaluation_alone_needs_no_bits_per_byte(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train.bin", 5000), ("val.bin", 500)):
        write_nanogpt(data / name, np.arange(count) % 90)
    given = settings(tmp_path / "run", data, data__vocab_size=90, trainer__workers=1, trainer__max_steps=2)
    assert start(command(**given)).wait() == 0
    job = start(command(**given, trainer__eval_only=True))
    assert job.wait() == 0 and "step 2  val/loss" in job.err(), job.err()


@pytest.mark.slow
def test_shards_that_were_prepared_with_another_tokenizer_are_refused(
    start: Start, text: Path, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "mingpt", "prepare", str(text), "--out", str(tmp_path / "data")]
    done = subprocess.run(line, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "other.json").write_bytes(small_bpe(text.read_text()))
    given = {"trainer__workers": 1, "trainer__max_steps": 1}
    run = settings(tmp_path / "run", tmp_path / "data", **given)
    job = start(command(**run, data__tokenizer=tmp_path / "other.json"))
    assert job.wait() == 2 and "were prepared with another tokenizer" in error_of(job)
    job = start(command(**run, data__sha256="a" * 64))
    assert job.wait() == 2 and "data.sha256 is for a text" in error_of(job)
    job = start(command(**run))
    assert job.wait() == 0 and read_metric(tmp_path / "run", "val/bits_per_byte"), job.err()


@pytest.mark.slow
def test_a_worker_without_the_package_ends_the_job_with_a_sentence(
    start: Start, shards: Path, tmp_path: Path
) -> None:
    """On one of two ranks, at the start and on resume."""
    hides = 'import os\nif os.environ.get("LOCAL_RANK") == "1":\n    sys.modules["tokenizers"] = None\n'
    program = changed_program(tmp_path, hides)
    given = settings(tmp_path / "run", shards, trainer__max_steps=5, trainer__workers=2)
    for _ in range(2):
        job = start(command(program=program, **given))
        assert job.wait() == 2, job.err()
        assert "pip install tokenizers" in error_of(job)
        assert start(command(**given)).wait() == 0
        given["trainer__max_steps"], given["snapshot__resume"] = 10, "changed"
