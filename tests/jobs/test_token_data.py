"""Jobs on token shards, and on texts with a tokenizer.json."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import Golden
from support.jobs import read_metric
from support.prepared import prepared
from support.sampling import sample
from support.shards import write_llmc
from support.small_jobs import Begin, Finish, error_of, manifest
from support.vocabularies import cl100k_like

from mingpt.data import JsonTokenizer
from mingpt.tools.jobs import ROOT, torchrun


@pytest.fixture
def shards(text: Path, tmp_path: Path) -> Path:
    """A folder with three training shards, one for validation, and their tokenizer."""
    folder, tokenizer = tmp_path / "shards", JsonTokenizer(cl100k_like(text.read_text(), 300))
    folder.mkdir()
    tokens = np.append(tokenizer.encode(text.read_text()), tokenizer.end_of_text or 0)
    for number, part in enumerate(np.split(tokens[:-1500], [1000, 3777])):
        write_llmc(folder / f"play_train_{number:06d}.bin", part)
    write_llmc(folder / "play_val_000000.bin", tokens[-1500:])
    (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    return folder


@pytest.mark.slow
def test_without_a_tokenizer_there_is_no_text(finish: Finish, shards: Path, run_dir: Path) -> None:
    (shards / "tokenizer.json").unlink()
    finish(trainer__workers=1, data__path=shards, data__vocab_size=300, trainer__sample_tokens=20)
    assert read_metric(run_dir, "val/loss")
    refused = sample(run_dir)
    assert refused.returncode == 2 and refused.stderr.startswith("error: the run has no tokenizer, so it has")


def test_sampling_needs_the_snapshot_alone(finish: Finish, shards: Path, run_dir: Path) -> None:
    """And nothing says how many bytes of text there are, so there are no bits per byte."""
    said = finish(trainer__workers=1, data__path=shards, trainer__sample_tokens=20).err()
    assert not read_metric(run_dir, "val/bits_per_byte") and "no bits per byte: no meta.json says" in said
    # Trained weights write a sample, random ones do not.
    expected = r"step 0/30  val/loss .*\n.*step 1/30 [^@]*step 10/30  val/loss .*\n +\S"
    assert re.search(expected, said), said
    about = manifest(run_dir, 30)
    assert about["tokenizer"]["kind"] == "json"
    assert list(about["data"]["files"]) == sorted(path.name for path in shards.glob("*.bin"))
    options = ["--prompt", "The king's", "--tokens", "50"]
    done = sample(run_dir / "snapshots" / "step_00000030.safetensors", *options)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("The king's")


@pytest.mark.weekly
def test_a_tokenizer_from_elsewhere_is_used_and_another_one_is_refused(
    begin: Begin, finish: Finish, text: Path, tmp_path: Path, run_dir: Path, golden: Golden
) -> None:
    """The cases: a text, with two workers and on resume, and shards that were prepared with characters."""
    path, data, new = tmp_path / "tokenizer.json", tmp_path / "data", tmp_path / "new"
    path.write_bytes(cl100k_like(text.read_text(), 300))
    said = finish(launcher=torchrun(2), data__tokenizer=path).err()
    assert "vocabulary of 300" in said and read_metric(run_dir, "val/bits_per_byte")
    path.write_bytes(cl100k_like(text.read_text(), 290))
    prepared(text, "--out", data)
    on_data: dict[str, Any] = {"run_dir": new, "data__path": data}
    for wrong in (
        {"data__tokenizer": path},
        {"data__tokenizer": "char"},
        {"data__tokenizer": "bpe", "run_dir": new},
        on_data | {"data__tokenizer": path},
        on_data | {"data__sha256": "a" * 64},
    ):
        golden(error_of(begin(trainer__workers=1, **wrong)).replace(str(ROOT), "ROOT"))
    finish(trainer__workers=1, trainer__max_steps=1, **on_data)
    assert read_metric(new, "val/bits_per_byte")
