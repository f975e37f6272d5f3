"""What a user may give by mistake ends in one sentence that names it."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from support.prepared import prepared, refused

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
    assert not list((tmp_path / "out").glob("*"))


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
