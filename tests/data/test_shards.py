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
from support.needs import need_proc
from support.shards import llmc_header, write_llmc, write_nanogpt

from mingpt.base.errors import ExpectedError, UserError
from mingpt.config import DataConfig
from mingpt.data.corpus import open_data
from mingpt.data.shards import VALIDATION, ShardData, TokenShards, open_shards

RNG = np.random.default_rng(0)


def some_tokens(count: int, below: int = 50257) -> np.ndarray:
    return RNG.integers(0, below, count)


def everything(tokens: TokenShards) -> list[int]:
    return tokens.read([0], len(tokens))[0].tolist()


def prepared(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write two training shards and a validation shard with their meta.json; returns its content."""
    for name, count in (("train_00000.bin", 30), ("train_00001.bin", 7), ("val_00000.bin", 12)):
        write_llmc(folder / name, some_tokens(count))
    meta = {
        "format": 1,
        "complete": True,
        "tokenizer": {"sha256": "a" * 64, "vocab_size": 50257, "end_of_text": 50256},
        "val_bytes": 40,
        "documents": {"train": 3, "val": 1},
        "files": [
            {
                "name": path.name,
                "tokens": (path.stat().st_size - 1024) // 2,
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.glob("*.bin"))
        ],
    } | changes
    (folder / "meta.json").write_text(json.dumps(meta))
    return meta


# Tokens that are read


@pytest.mark.parametrize("write", [write_nanogpt, write_llmc, partial(write_llmc, wide=True)])
def test_a_folder_of_nanogpts_names_is_read_with_and_without_headers(
    write: Callable[[Path, np.ndarray], None], tmp_path: Path
) -> None:
    train, val = some_tokens(100), some_tokens(20)
    write(tmp_path / "train.bin", train)
    write(tmp_path / "val.bin", val)
    for name in ("meta.pkl", "._val.bin"):
        (tmp_path / name).write_bytes(b"never read")
    for path in (str(tmp_path), f"file://{tmp_path}"):
        data = open_data(DataConfig(path=path))
        assert isinstance(data, ShardData) and list(data.files) == ["train.bin", "val.bin"]
        assert everything(data.train) == train.tolist() and everything(data.val) == val.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("val.bin", True),
        ("val_00000.bin", True),
        ("fineweb_val_000000.bin", True),
        ("shard-val-3.bin", True),
        ("val7.bin", True),
        ("validation_0.bin", True),
        ("medieval_000.bin", False),
        ("valley_0.bin", False),
        ("interval.bin", False),
    ],
)
def test_val_as_a_word_of_the_name_makes_a_file_validation(name: str, expected: bool) -> None:
    assert bool(VALIDATION.search(name)) is expected


@pytest.mark.parametrize("val_fraction", [0.1, 0.37, 0.5, 0.9])
def test_without_validation_files_the_tail_is_validation(val_fraction: float, tmp_path: Path) -> None:
    tokens = some_tokens(110)
    for number, part in enumerate(np.array_split(tokens, 4)):
        write_llmc(tmp_path / f"shard_{number}.bin", part)
    data = open_shards(tmp_path, val_fraction)
    n_train = int(110 * (1 - val_fraction))
    assert everything(data.train) == tokens[:n_train].tolist()
    assert everything(data.val) == tokens[n_train:].tolist()


def test_windows_are_those_of_one_array_also_across_files(tmp_path: Path) -> None:
    """The shards have 1 to 50 tokens, in both types."""
    parts = []
    for number in range(60):
        wide = bool(RNG.integers(2))
        parts.append(some_tokens(int(RNG.integers(1, 51)), 2**32 - 1 if wide else 2**16))
        write_llmc(tmp_path / f"{number:02d}{'_val' * (number > 49)}.bin", parts[-1], wide=wide)
    data = open_shards(tmp_path, 0.1)
    for tokens, of_part in ((data.train, parts[:50]), (data.val, parts[50:])):
        expected = np.concatenate(of_part)
        assert len(tokens) == len(expected)
        for length in range(1, len(expected), 7):
            starts = RNG.integers(0, len(expected) - length + 1, int(RNG.integers(0, 9)))
            windows = tokens.read(starts, length)
            assert windows.dtype == np.int64 and windows.shape == (len(starts), length)
            assert windows.tolist() == [expected[start : start + length].tolist() for start in starts]


def test_a_file_that_changes_or_goes_while_it_is_in_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_llmc(path, range(1000))
    tokens = open_shards(tmp_path, 0.1).train
    write_llmc(path, range(1001))
    with pytest.raises(ExpectedError, match=r"/a\.bin has changed its size while it was in use"):
        tokens.read([500], 4)
    path.unlink()
    with pytest.raises(ExpectedError, match=r"a\.bin cannot be read: No such file"):
        tokens.read([0], 4)


# Fingerprints


def test_a_change_of_content_changes_the_fingerprint_of_its_file_alone(tmp_path: Path) -> None:
    for number in range(3):
        write_llmc(tmp_path / f"a_{number}.bin", some_tokens(30_000))
    before = open_shards(tmp_path, 0.1)
    size = (tmp_path / "a_1.bin").stat().st_size
    for place in (1024, 4095, (size - 4096) // 3, (size - 4096) * 2 // 3 + 4095, size - 4096, size - 1):
        content = bytearray((tmp_path / "a_1.bin").read_bytes())
        content[place] ^= 1
        (tmp_path / "a_1.bin").write_bytes(content)
        after = open_shards(tmp_path, 0.1)
        assert after.fingerprint != before.fingerprint
        assert [name for name in after.files if after.files[name] != before.files[name]] == ["a_1.bin"]
        before = after


def test_a_prepared_folder_has_its_fingerprints_from_meta_json(tmp_path: Path) -> None:
    meta = prepared(tmp_path)
    data = open_shards(tmp_path, 0.5)
    (tmp_path / "meta.json").rename(tmp_path / "not.json")
    sampled = open_shards(tmp_path, 0.5).files
    assert data.files == {
        entry["name"]: hashlib.sha256((entry["sha256"] + sampled[entry["name"]]).encode()).hexdigest()
        for entry in meta["files"]
    }
    digests = "".join(data.files.values()).encode()
    assert data.fingerprint == hashlib.sha256(digests).hexdigest()
    assert (len(data.train), len(data.val)) == (37, 12)


# Damage: each kind has its sentence, which names the file


def overwrite(path: Path, place: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


def remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "wrong magic": (
        lambda folder: overwrite(folder / "train_00000.bin", 0, np.int32(1234).tobytes()),
        r"/train_00000\.bin has .* begins with 1234.*20240520 or 20240801: if it holds nanoGPT's tokens, "
        r"name it train\.bin or val\.bin; otherwise move it to another folder$",
    ),
    "version": (
        lambda folder: overwrite(folder / "train_00000.bin", 4, np.int32(2).tobytes()),
        r"/train_00000\.bin has .* version 2,",
    ),
    "longer than it says": (
        lambda folder: overwrite(folder / "train_00000.bin", 1084, b"xx"),
        r"/train_00000\.bin has 1,086 bytes.* 30 tokens with their header take 1,084: copy it again",
    ),
    "cut in its header": (
        lambda folder: os.truncate(folder / "train_00000.bin", 600),
        r"/train_00000\.bin has 600 bytes, and 30 tokens with their header take 1,084: copy it again",
    ),
    "an evaluation file": (
        lambda folder: overwrite(folder / "val_00000.bin", 0, np.int32(20240522).tobytes()),
        r"/val_00000\.bin has .* begins with 20240522 and version 1,",
    ),
    "empty": (
        lambda folder: os.truncate(folder / "train_00000.bin", 0),
        r"/train_00000\.bin has 0 bytes, begins with 0 and",
    ),
    "odd size": (
        lambda folder: (folder / "train.bin").write_bytes(bytes(4001)),
        r"/train\.bin has 4,001 bytes, and 2,000 tokens with .* take 4,000",
    ),
    "a folder": (lambda folder: (folder / "a.bin").mkdir(), r"/a\.bin .*is not a regular file"),
    "a device": (
        lambda folder: (folder / "a.bin").symlink_to("/dev/zero"),
        r"/a\.bin .*is not a regular file",
    ),
    "no shard": (
        lambda folder: remove(folder, "*"),
        r" has no file for training.*`python -m mingpt prepare`",
    ),
    "no shard for training": (lambda folder: remove(folder, "train*"), " has no file for training"),
}


def change_meta(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: prepared(folder, **changes)


META_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not finished": (change_meta(complete=False), "was interrupted: remove the folder .* again"),
    "not text": (lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe"), "is damaged"),
    "another purpose": (lambda folder: (folder / "meta.json").write_text('{"a": 1}'), "rename it to read"),
    "a later format": (change_meta(format=2), "damaged: format: "),
    "vocabulary": (
        change_meta(tokenizer={"sha256": None, "vocab_size": 0, "end_of_text": None}),
        r"damaged: tokenizer\.vocab_size: ",
    ),
    "bytes of validation": (change_meta(val_bytes=-1), "damaged: val_bytes: "),
    "a missing file": (
        lambda folder: (folder / "train_00001.bin").unlink(),
        r"train_00001\.bin is missing.*meta\.json",
    ),
    "another file": (
        lambda folder: write_llmc(folder / "train_00002.bin", [1]),
        r"train_00002\.bin is missing, or is not in .*meta\.json",
    ),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *META_DAMAGE])
def test_damage_is_told_in_a_sentence(kind: str, tmp_path: Path) -> None:
    prepared(tmp_path)
    open_shards(tmp_path, 0.1)
    if kind in DAMAGE:
        (tmp_path / "meta.json").unlink()
    damage, sentence = (DAMAGE | META_DAMAGE)[kind]
    damage(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        open_shards(tmp_path, 0.1)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_200_gb_are_read_with_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    """The files are sparse."""
    need_proc()
    count = (200_000_000 - 1024) // 2
    for number in range(1000):
        (tmp_path / f"train_{number:05}.bin").write_bytes(llmc_header(count))
        os.truncate(tmp_path / f"train_{number:05}.bin", 1024 + 2 * count)
    tracemalloc.start()
    tokens = open_shards(tmp_path, 0.01).train
    assert not tokens.read(RNG.integers(0, len(tokens) - 1025, 640), 1025).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and len(os.listdir("/proc/self/fd")) < 100
