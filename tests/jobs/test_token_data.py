"""Jobs on token shards, and on texts with a tokenizer.json."""

from pathlib import Path

import numpy as np
import pytest
from support.commands import sample
from support.jobs import Finish, manifest
from support.shards import write_llmc
from support.vocabularies import cl100k_like

from mingpt.data import JsonTokenizer


@pytest.fixture
def shards(text: Path, tmp_path: Path) -> Path:
    folder, tokenizer = tmp_path / "shards", JsonTokenizer(cl100k_like(text.read_text(), 300))
    folder.mkdir()
    tokens = np.append(tokenizer.encode(text.read_text()), tokenizer.end_of_text or 0)
    for number, part in enumerate(np.split(tokens[:-1500], [1000, 3777])):
        write_llmc(folder / f"play_train_{number:06d}.bin", part)
    write_llmc(folder / "play_val_000000.bin", tokens[-1500:])
    (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    return folder


def test_sampling_needs_the_snapshot_alone(finish: Finish, shards: Path, run_dir: Path) -> None:
    finish(trainer__workers=1, data__path=shards)
    about = manifest(run_dir, 30)
    assert about["tokenizer"]["kind"] == "json"
    assert list(about["data"]["files"]) == sorted(path.name for path in shards.glob("*.bin"))
    options = ["--prompt", "The king's", "--tokens", "50"]
    done = sample(run_dir / "snapshots" / "step_00000030.safetensors", *options)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("The king's")
