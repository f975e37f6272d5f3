"""The command as users run it: shards, split, formats of text, mistakes, and what a kill leaves."""

import gzip
import hashlib
import json
import lzma
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from support.commands import refusal, refused, run_here
from support.golden import Golden
from tokenizers import Tokenizer as PackageTokenizer

from mingpt.data.shards import TokenShards, open_shards
from mingpt.tools import prepare
from mingpt.tools.jobs import ROOT, clean_environment
from mingpt.tools.prepare import main

END = "<|endoftext|>"
WORDS = [
    "the",
    " sea",
    "  two",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " ",
    "é",
    "海と空",
    "🙂",
    "42",
    "it's",
    END,
    "\u00a0",
    ".",
]


def run_apart(*words: object, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, which runs the Python code `before` first."""
    run = "runpy.run_module('mingpt', run_name='__main__', alter_sys=True)"
    start = f"import runpy, sys\n{before}\n{run}"
    command = [sys.executable, "-c", start, "prepare", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(**env), capture_output=True, text=True, timeout=300
    )


def prepared(*words: object) -> str:
    done = run_here(main, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def digests(folder: Path) -> dict[str, str]:
    names = sorted(path.name for path in folder.iterdir())
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def tokens_of(folder: Path, part: Literal["train", "val"]) -> list[int]:
    shards: TokenShards = getattr(open_shards(folder, 0.1), part)
    return shards.read([0], len(shards))[0].tolist()


def read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
    return meta


def mixed(characters: int, seed: int) -> str:
    rng, text = random.Random(seed), ""
    while len(text) < characters:
        text += "".join(rng.choices(WORDS, k=200))
    return text[:characters]


PLAY = ROOT / "data/README.md"
BPE = ["--tokenizer", "bpe", "--vocab_size", 400]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a small BPE that has learned runs of whitespace, which wrong cuts would break."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "a.txt").write_bytes(mixed(200_000, 0).encode())
    prepared(folder / "a.txt", "--out", folder / "out", *BPE)
    return folder / "out" / "tokenizer.json"


def expected(path: Path, *documents: str) -> list[int]:
    """The tokens of whole documents by the package alone, each with the end of a text if there is one."""
    package = PackageTokenizer.from_file(str(path))
    package.encode_special_tokens = True
    end = [token for token in [package.token_to_id(END)] if token is not None]
    encodings = package.encode_batch_fast(documents, add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids + end]


# Shards


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_one_text_is_split_as_training_splits_it(
    kind: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.data.json_tokenizer.PIECE_CHARACTERS", 500)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 3001)
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 6000)
    text, out = mixed(30_000, 1), tmp_path / "out"
    (tmp_path / "a.txt").write_bytes(text.encode())
    tokenizer = kind if kind == "char" else bpe
    line = prepared(tmp_path / "a.txt", "--out", out, "--val_fraction", 0.2, "--tokenizer", tokenizer)
    train, val = (expected(out / "tokenizer.json", part) for part in (text[:24_000], text[24_000:]))
    assert tokens_of(out, "train") == train[: len(train) - (kind == "bpe")]  # the document goes on
    assert tokens_of(out, "val") == val
    meta = read_meta(out)
    assert (meta["val_bytes"], meta["files"][0]["tokens"]) == (len(text[24_000:].encode()), 3001)
    assert line.endswith(f"vocabulary of {meta['tokenizer']['vocab_size']}\n")


def test_documents_end_with_end_of_text_and_are_never_cut(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .jsonl, a compressed one, a text and a parquet file, by names and patterns."""
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 6000)
    texts = [mixed((0, 1, 50, 3000)[seed * seed % 7 % 4], seed) for seed in range(400)]
    texts[199], texts[370] = mixed(50, 199), mixed(200_000, 5)
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "1.jsonl").write_bytes("\r\n".join(lines[:100]).encode("utf-8-sig"))
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress("\n\n".join(lines[100:199]).encode()))
    (tmp_path / "3.txt").write_bytes(texts[199].encode("utf-8-sig"))  # the mark is no part of the text
    table = pyarrow.table({"text": texts[200:], "url": ["u"] * 200})
    parquet.write_table(table, tmp_path / "4.parquet", row_group_size=30)
    out, url = tmp_path / "out", f"file://{tmp_path}"
    prepared(tmp_path / "*.jsonl*", f"{url}/3.txt", f"{url}/*.parquet", "--out", out, "--tokenizer", bpe)
    sizes = [len(text.encode()) for text in texts]
    border = next(n for n in range(400) if sum(sizes[:n]) >= int(sum(sizes) * 0.9))
    assert tokens_of(out, "train") == expected(bpe, *texts[:border])
    assert tokens_of(out, "val") == expected(bpe, *texts[border:])


LINES = [f'{{"text": "document {number}"}}\n'.encode() for number in range(40)]
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0skip"  # a frame without text, as pzstd writes it


@pytest.mark.parametrize(
    ("name", "compress", "between"),
    [
        ("a.jsonl.gz", gzip.compress, b""),
        ("a.jsonl.xz", lzma.compress, bytes(8)),
        ("a.jsonl.zst", zstandard.compress, SKIPPED),
    ],
)
def test_all_frames_of_a_compressed_file_are_read(
    name: str, compress: Callable[[bytes], bytes], between: bytes, tmp_path: Path
) -> None:
    parts = (LINES[:20], LINES[20:])
    (tmp_path / name).write_bytes(between.join(compress(b"".join(part)) for part in parts))
    for where in (tmp_path / name, f"file://{tmp_path / name}"):
        assert list(prepare.read([str(where)])) == [f"document {number}" for number in range(40)]


def test_a_vocabulary_past_65536_takes_four_bytes_a_token(tmp_path: Path) -> None:
    codes = [*range(0x20, 0xD800), *range(0x10000, 0x18000)]
    (tmp_path / "a.txt").write_text("".join(map(chr, codes)))
    prepared(tmp_path / "a.txt", "--out", tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train") + tokens_of(tmp_path / "out", "val") == [*range(len(codes))]


# The BPE


@pytest.mark.slow
def test_own_bpe_is_the_same_with_one_thread_and_trains_on_no_validation(bpe: Path, tmp_path: Path) -> None:
    """All files are the same, from training to shards. The last tenth is for validation."""
    assert read_meta(bpe.parent)["tokenizer"]["vocab_size"] == 400
    text = mixed(200_000, 0)
    for name, last in (("one", text[180_000:]), ("other", text[20_000:0:-1])):
        (tmp_path / f"{name}.txt").write_bytes((text[:180_000] + last).encode())
        words = tmp_path / f"{name}.txt", "--out", tmp_path / name
        assert run_apart(*words, *BPE, RAYON_NUM_THREADS="1").returncode == 0
    plain, one, other = digests(bpe.parent), digests(tmp_path / "one"), digests(tmp_path / "other")
    assert one == plain and other["tokenizer.json"] == plain["tokenizer.json"]
    assert other["val_00000.bin"] != plain["val_00000.bin"]


# Mistakes: each ends in one sentence that names it


TAR = b"a.txt".ljust(257, b"\0") + b"ustar".ljust(255, b"\0") + b"a" * 2048
HOSTILE: list[tuple[str, str, bytes]] = [
    ("a.txt", "{} cannot be read: ValueError: not UTF-8: byte 0xff at offset 2", b"ab\xff"),
    ("b.txt", "UTF-16 (or 32): convert it by `iconv", "text".encode("utf-16")),
    ("empty.txt", "the files hold no text", b""),
    ("b.jsonl", "line 3 of {} cannot be read: ", b'{"text": "a"}\n\n{"text": \n'),
    ("e.jsonl", "line 1 of {} cannot be read: ", b'{"text": 3}'),
    ("g.jsonl", "line 1 of {} cannot be read: Unicode", b'{"text": "\\ud800"}'),
    ("l.parquet", "{} cannot be read: ArrowInvalid", b"PAR1 no"),
    ("n.txt.gz", "{} cannot be read: EOFError", gzip.compress(b"a" * 9999, mtime=0)[:-9]),
    (
        "p.txt.zst",
        "the compressed data end too early: copy the file again",
        zstandard.compress(mixed(9999, 1).encode())[:-999],
    ),
    ("u.zip", "{} is a zip archive: unpack it, and name its files", b"PK"),
    ("y.tar.gz", "{} cannot be read: ValueError: a tar archive: unpack it", gzip.compress(TAR)),
]


@pytest.mark.parametrize(("name", "sentence", "content"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_a_bad_text_is_named(name: str, sentence: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert sentence.format(tmp_path / name) in refused(main, tmp_path / name, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    [
        ["--val_fraction", "nan"],
        ["--vocab_size", 256],
        ["--tokenizer", "{}/a.txt"],
        ["{}/absent.txt"],
        ["http://me:secret@127.0.0.1:9/a.txt"],
        ["--out", "{}"],
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_mistake_is_one_sentence(words: list[object], tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "a.txt").write_text("a text")
    given = [str(word).format(tmp_path) for word in words]
    said = refused(main, "--out", tmp_path / "out", tmp_path / "a.txt", *given)
    golden(said.partition(" Connect call failed")[0])  # the rest is from another package


# Commands that did not end

AT_CALL = """
import os
from mingpt.tools import prepare
from mingpt.tools.prepare import main
prepare.SHARD_TOKENS, calls = 11_000, 0
def count(function):
    def counted(*words):
        global calls
        calls += 1
        if calls == {call}:
            os.kill(os.getpid(), 9)
        return function(*words)
    return counted
os.replace, os.fsync, prepare.open = count(os.replace), count(os.fsync), count(open)
"""

# In place of the package: its training never ends, and is told to after a moment.


@pytest.mark.parametrize(
    "call", [5, *(pytest.param(call, marks=pytest.mark.slow) for call in (2, 9, 11, 14))]
)
def test_the_folder_of_a_killed_command_is_refused_until_it_is_removed(call: int, tmp_path: Path) -> None:
    """The command kills itself before its n-th opening, fsync or rename: of 1 to 14, after the first."""
    (tmp_path / "a.txt").write_bytes(mixed(30_000, 1).encode())
    out = tmp_path / "out"
    words = [tmp_path / "a.txt", "--out", out]
    done = run_apart(*words, before=AT_CALL.format(call=call))
    assert done.returncode == -signal.SIGKILL, done.stderr
    way_out = f"was interrupted: remove the folder {out} and run the same command again"
    assert way_out in refused(main, *words) and way_out in refusal(open_shards, out, 0.1)
    shutil.rmtree(out)
    prepared(*words)
    assert len(tokens_of(out, "train")) + len(tokens_of(out, "val")) == 30_000


def test_two_commands_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.listdir", lambda path: [])  # both have looked before either writes
    prepared(PLAY, "--out", tmp_path / "out")
    assert "meta.json cannot be written: File exists" in refused(main, PLAY, "--out", tmp_path / "out")
