"""Token shards of other programs: found, ordered, checked, read as one array."""

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import Golden
from support.jobs import need_proc
from support.shards import llmc_header, write_llmc, write_nanogpt

from mingpt.base.errors import ExpectedError, UserError
from mingpt.config import DataConfig
from mingpt.data.corpus import open_data
from mingpt.data.shards import VALIDATION, ShardData, open_shards

RNG = np.random.default_rng(0)


def some_tokens(count: int, below: int = 50257) -> np.ndarray:
    return RNG.integers(0, below, count)


def prepared(folder: Path, **changes: Any) -> None:
    for name, count in (("train_00000.bin", 30), ("train_00001.bin", 7), ("val_00000.bin", 12)):
        write_llmc(folder / name, some_tokens(count))
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))
    }
    meta = {
        "format": 1,
        "complete": True,
        "tokenizer": {"sha256": "a" * 64, "vocab_size": 50257, "end_of_text": 50256},
        "val_bytes": 40,
        "documents": {"train": 3, "val": 1},
        "files": [{"name": name, "sha256": sha256} for name, sha256 in hashes.items()],
    }
    (folder / "meta.json").write_text(json.dumps(meta | changes))


# Tokens that are read


@pytest.mark.parametrize("write", [write_nanogpt, write_llmc, partial(write_llmc, wide=True)])
def test_a_folder_of_nanogpts_names_is_read_with_and_without_headers(
    write: Callable[[Path, np.ndarray], None], tmp_path: Path
) -> None:
    tokens = {name: some_tokens(100) for name in ("train.bin", "val.bin")}
    for name in tokens:
        write(tmp_path / name, tokens[name])
    (tmp_path / "._val.bin").write_bytes(b"never read")
    for path in (str(tmp_path), f"file://{tmp_path}"):
        data = open_data(DataConfig(path=path))
        assert isinstance(data, ShardData) and list(data.files) == list(tokens)
        read = [part.read([0], 100)[0].tolist() for part in (data.train, data.val)]
        assert read == [part.tolist() for part in tokens.values()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("val.bin", True),
        ("val_00000.bin", True),
        ("fineweb_val_000000.bin", True),
        ("shard-val-3.bin", True),
        ("val7.bin", True),
        ("validation_0.bin", True),
        ("Val.bin", True),
        ("x_VAL_0.bin", True),
        ("medieval_000.bin", False),
        ("valley_0.bin", False),
        ("interval.bin", False),
    ],
)
def test_val_as_a_word_of_the_name_makes_a_file_validation(name: str, expected: bool) -> None:
    assert bool(VALIDATION.search(name)) is expected


@pytest.mark.parametrize("val_fraction", [0.1, 0.37, 0.5, 0.9])
def test_without_validation_files_the_tail_is_validation(val_fraction: float, tmp_path: Path) -> None:
    tokens, n_train = some_tokens(110), int(110 * (1 - val_fraction))
    for number, part in enumerate(np.array_split(tokens, 4)):
        write_llmc(tmp_path / f"shard_{number}.bin", part)
    data = open_shards(tmp_path, val_fraction)
    assert data.train.read([0], n_train)[0].tolist() == tokens[:n_train].tolist()
    assert data.val.read([0], 110 - n_train)[0].tolist() == tokens[n_train:].tolist()


def test_windows_are_those_of_one_array_also_across_files(tmp_path: Path) -> None:
    parts = []
    for number, wide in enumerate(RNG.integers(2, size=60)):
        parts.append(some_tokens(int(RNG.integers(1, 51)), 2**32 - 1 if wide else 2**16))
        write_llmc(tmp_path / f"{number:02d}{'_val' * (number > 49)}.bin", parts[-1], wide=bool(wide))
    data = open_shards(tmp_path, 0.1)
    for tokens, of_part in ((data.train, parts[:50]), (data.val, parts[50:])):
        expected = np.concatenate(of_part)
        assert len(tokens) == len(expected)
        for length in range(1, len(expected), 7):
            starts = RNG.integers(0, len(expected) - length + 1, int(RNG.integers(0, 9)))
            windows = tokens.read(starts, length)
            assert windows.dtype == np.int64 and windows.shape == (len(starts), length)
            assert windows.tolist() == [expected[start : start + length].tolist() for start in starts]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: write_llmc(path, range(1001)), r"/a\.bin has changed its size while it was in use"),
        (Path.unlink, r"/a\.bin cannot be read: No such file"),
    ],
    ids=["changes", "goes"],
)
def test_a_file_that_changes_or_goes_while_it_is_in_use_is_named(
    change: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    write_llmc(tmp_path / "a.bin", range(1000))
    tokens = open_shards(tmp_path, 0.1).train
    change(tmp_path / "a.bin")
    with pytest.raises(ExpectedError, match=sentence):
        tokens.read([500], 4)


# Fingerprints


SIZE = 1024 + 60_000


@pytest.mark.parametrize(
    "place", [1024, 4095, (SIZE - 4096) // 3, (SIZE - 4096) * 2 // 3 + 4095, SIZE - 4096, SIZE - 1]
)
def test_a_change_of_content_changes_the_fingerprint_of_its_file_alone(place: int, tmp_path: Path) -> None:
    for number in range(3):
        write_llmc(tmp_path / f"a_{number}.bin", np.arange(30_000))
    before = open_shards(tmp_path, 0.1)
    overwrite(tmp_path / "a_1.bin", place, b"\xff")
    after = open_shards(tmp_path, 0.1)
    assert after.fingerprint != before.fingerprint
    assert [name for name in after.files if after.files[name] != before.files[name]] == ["a_1.bin"]


# Damage: each kind has its sentence, which names the file


def overwrite(path: Path, place: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


Damage = Callable[[Path], object]
# {what is damaged: how it is done}, in a folder without a meta.json and in one with it
DAMAGE: dict[str, Damage] = {
    "wrong magic": lambda folder: overwrite(folder / "train_00000.bin", 0, np.int32(1234).tobytes()),
    "version": lambda folder: overwrite(folder / "train_00000.bin", 4, np.int32(2).tobytes()),
    "longer than it says": lambda folder: overwrite(folder / "train_00000.bin", 1084, b"xx"),
    "cut in its header": lambda folder: os.truncate(folder / "train_00000.bin", 600),
    "an evaluation file": lambda folder: overwrite(folder / "val_00000.bin", 0, np.int32(20240522).tobytes()),
    "empty": lambda folder: os.truncate(folder / "train_00000.bin", 0),
    "odd size": lambda folder: (folder / "train.bin").write_bytes(bytes(4001)),
}
META_DAMAGE: dict[str, Damage] = {
    "not finished": lambda folder: prepared(folder, complete=False),
    "another purpose": lambda folder: (folder / "meta.json").write_text('{"a": 1}'),
    "a later format": lambda folder: prepared(folder, format=2),
    "vocabulary": lambda folder: prepared(folder, tokenizer={"sha256": None, "vocab_size": 0}),
    "a missing file": lambda folder: (folder / "train_00001.bin").unlink(),
    "another file": lambda folder: write_llmc(folder / "train_00002.bin", [1]),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *META_DAMAGE])
def test_damage_is_told_in_a_sentence(kind: str, tmp_path: Path, golden: Golden) -> None:
    prepared(tmp_path)
    open_shards(tmp_path, 0.1)
    if kind in DAMAGE:
        (tmp_path / "meta.json").unlink()
    (DAMAGE | META_DAMAGE)[kind](tmp_path)
    with pytest.raises(UserError) as caught:
        open_shards(tmp_path, 0.1)
    golden(str(caught.value))


def test_200_gb_are_read_with_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    need_proc()
    count = (200_000_000 - 1024) // 2
    for path in [tmp_path / f"train_{number:05}.bin" for number in range(1000)]:
        path.write_bytes(llmc_header(count))
        os.truncate(path, 1024 + 2 * count)
    tracemalloc.start()
    tokens = open_shards(tmp_path, 0.01).train
    assert not tokens.read(RNG.integers(0, len(tokens) - 1025, 640), 1025).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and len(os.listdir("/proc/self/fd")) < 100
