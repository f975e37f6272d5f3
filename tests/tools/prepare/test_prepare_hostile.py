"""What a user may give by mistake ends in one sentence that names it."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from support.prepared import prepared, refused, run_prepare

PLAY = ROOT / "data/README.md"
Make = Callable[[Path], object]


def write_parquet(path: Path, **columns: list[str | None]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


LONG = b"\xc3\xa9" * 750_000 + b"a\xff"
BAD_LINE = b'{"text": "a"}\n{"\x80"}'
SURROGATE = '{"text": "\\ud800"}'
TORN = gzip.compress(b"a" * 9999)[:-9]
HOSTILE: list[tuple[str, str, Make]] = [
    ("a.txt", "a.txt is not UTF-8: byte 0xff at offset 1,500,001", lambda path: path.write_bytes(LONG)),
    ("cut.txt", "cut.txt is not UTF-8: byte 0xc3 at offset 2", lambda path: path.write_bytes(b"ab\xc3")),
    ("empty.txt", "empty.txt holds no text", lambda path: path.touch()),
    ("empty.jsonl", "empty.jsonl holds no text", lambda path: path.write_bytes(b"\n\n")),
    ("short.txt", "leaves nothing to train on", lambda path: path.write_text("a")),
    ("b.jsonl", "line 3 of ", lambda path: path.write_text('{"text": "a"}\n\n{"text": \n')),
    ("c.jsonl", 'line 1 of {} is no document with a text', lambda path: path.write_text('{"body": "a"}')),
    ("d.jsonl", 'line 1 of {} is no document with a text', lambda path: path.write_text('["text"]')),
    ("e.jsonl", 'line 1 of {} is no document with a text', lambda path: path.write_text('{"text": 3}')),
    ("f.jsonl", "not UTF-8: byte 0x80 at offset 2", lambda path: path.write_bytes(BAD_LINE)),
    ("g.jsonl", "line 1 of {} is no document with a text", lambda path: path.write_text(SURROGATE)),
    ("h.jsonl", "line 1 of {} is no document with a text", lambda path: path.write_text("[" * 200_000)),
    ("i.jsonl", "line 1 of {} is longer than 64 MiB", lambda path: path.write_bytes(b"x" * (65 << 20))),
    ("j.parquet", "row 1 of {} is no document with", lambda path: write_parquet(path, content=["a"])),
    ("k.parquet", "row 2 of {} is no document with", lambda path: write_parquet(path, text=["a", None])),
    ("l.parquet", "{} cannot be read: ArrowInvalid", lambda path: path.write_bytes(b"PAR1 no")),
    ("m.txt.gz", "{} cannot be read: BadGzipFile", lambda path: path.write_text("plain")),
    ("n.txt.gz", "{} cannot be read: EOFError", lambda path: path.write_bytes(TORN)),
    ("folder", "{} is a folder: name its files by a pattern", lambda path: path.mkdir()),
    ("absent.txt", "{} does not exist", lambda path: None),
    ("none*.txt", "no file matches {}", lambda path: None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected", "make"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
def test_a_bad_text_is_named(name: str, expected: str, make: Make, tmp_path: Path) -> None:
    path = tmp_path / name
    make(path)
    assert expected.format(path) in refused(path, "--out", tmp_path / "out")
    assert not (tmp_path / "out/meta.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--val_fraction", 0], "--val_fraction is 0.0, and must be between 0 and 1"),
        (["--val_fraction", 1], "--val_fraction is 1.0"),
        (["--val_fraction", "nan"], "--val_fraction is nan"),
        (["--shard_tokens", 0], "--shard_tokens is 0"),
        (["--tokenizer", "bpe", "--vocab_size", 256], "--vocab_size is 256, and must be 257"),
        (["--vocab_size", "many"], "invalid int value: 'many'"),
        (["--tokens", "3"], "unrecognized arguments: --tokens"),
        (["--vocab_size", 512], "--vocab_size 512 goes with --tokenizer bpe, and the tokenizer is char"),
        (
            ["--tokenizer", "/absent/tokenizer.json"],
            "error: --tokenizer /absent/tokenizer.json does not exist",
        ),
        (["--tokenizer", str(PLAY)], f"error: --tokenizer {PLAY} is neither gpt2, nor "),
        (
            ["--tokenizer", str(ROOT / "data/input.json")],
            f"--tokenizer {ROOT}/data/input.json cannot be used: ",
        ),
        (["--check", "x"], "--check stands alone"),
    ],
)
def test_a_bad_option_is_named(words: list[object], expected: str, tmp_path: Path) -> None:
    assert expected in refused(PLAY, "--out", tmp_path / "out", *words)


def test_no_text_or_no_folder_is_a_sentence(tmp_path: Path) -> None:
    assert "name at least one text" in refused("--out", tmp_path / "out")
    assert "name at least one text" in refused(PLAY)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be made a folder: Not a directory" in refused(PLAY, "--out", tmp_path / "file" / "out")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters need neither of them."""
    for package in ("tokenizers", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "pip install tokenizers" in refused(PLAY, "--out", tmp_path / "bpe", "--tokenizer", "bpe")
    assert "import of pyarrow" in refused(tmp_path / "a.parquet", "--out", tmp_path / "parquet")
    prepared(PLAY, "--out", tmp_path / "out")


def test_credentials_of_a_url_are_not_shown(tmp_path: Path) -> None:
    said = refused("http://me:secret@127.0.0.1:9/a.txt", "--out", tmp_path / "out")
    assert "secret" not in said and "http://me:***@127.0.0.1" in said


ELSEWHERE = {"name": "../a", "tokens": 1, "bytes": 1, "sha256": ""}
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a bit", lambda out: flip(out / "train_00001.bin", 1500, 1), "train_00001.bin: sha256 is"),
    ("cut", lambda out: (out / "train_00000.bin").write_bytes(b""), "train_00000.bin has 0 bytes"),
    ("gone", lambda out: (out / "val_00000.bin").unlink(), "val_00000.bin does not exist"),
    ("header", lambda out: flip(out / "val_00000.bin", 0), "val_00000.bin begins with"),
    ("version", lambda out: flip(out / "val_00000.bin", 4), "begins with 20240520 and version 254"),
    ("token", lambda out: flip(out / "train_00000.bin", -1), "train_00000.bin: holds token"),
    ("tokenizer", lambda out: flip(out / "tokenizer.json", 9), "tokenizer.json has sha256"),
    ("no tokenizer", lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
    ("stray", lambda out: (out / "more.bin").touch(), "more.bin: meta.json does not list it"),
    ("meta", lambda out: flip(out / "meta.json", 0), "meta.json is damaged: "),
    ("meta field", lambda out: change_meta(out, files=3), "meta.json is damaged: files: "),
    ("meta path", lambda out: change_meta(out, files=[ELSEWHERE]), "meta.json is damaged: files.0.name: "),
    ("unfinished", lambda out: change_meta(out, complete=False), "meta.json says that prepare has not"),
]  # fmt: skip


def flip(path: Path, place: int, bits: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


def change_meta(out: Path, **fields: object) -> None:
    path = out / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGE, ids=[name for name, _, _ in DAMAGE])
def test_check_names_what_is_damaged(name: str, damage: Make, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_bytes((ROOT / "data/input.txt").read_bytes()[:5000])
    prepared(tmp_path / "a.txt", "--out", out, "--shard_tokens", 1000)
    assert prepared("--check", out).startswith(f"{out}: 5,000 tokens in 6 files, largest token ")
    damage(out)
    done = run_prepare("--check", out)
    assert done.returncode == 1 and expected in done.stdout.replace(f"{out}/", ""), done.stdout


def test_check_reads_shards_of_other_programs(tmp_path: Path) -> None:
    out = tmp_path / "foreign"
    assert "is no folder" in refused("--check", out)
    out.mkdir()
    (out / "train.bin").write_bytes(b"\x01\x00\x00\xc4")
    assert f"{out}: 2 tokens in 1 files, largest token {0xC400}" in prepared("--check", out)
