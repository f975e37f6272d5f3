"""Killed at any moment, the same command goes on and leaves the bytes of one that nothing disturbed."""

import errno
import json
import signal
from pathlib import Path

import pytest
from conftest import ROOT
from support.faults import FaultyDisk
from support.prepared import digests, mixed, prepared, refused, run_apart, write_documents
from support.vocabularies import cl100k_like

from mingpt.tools.prepare import documents
from mingpt.tools.prepare.folder import open_folder

OPTIONS = ["--tokenizer", "bpe", "--vocab_size", 300, "--shard_tokens", 4000]
AT_CALL = """
import io, os, signal
from mingpt.tools.prepare import documents
documents.PIECE_BYTES, documents.BATCH_BYTES = 500, 5000
calls = 0
def count(function):
    def counted(*words):
        global calls
        done = function(*words)
        calls += 1
        if calls == {call}:
            os.kill(os.getpid(), signal.{signal})
        return done
    return counted
os.write, os.replace, os.fsync = count(os.write), count(os.replace), count(os.fsync)
from mingpt.tools.prepare import folder
folder.write_all = count(folder.write_all)
"""

# A shell that starts the tests in the background has the signal ignored, which children inherit.
HEARD = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
# In place of the package: its training never ends, and is told to after a moment.
DEAF = """
import ctypes, os, threading, tokenizers
class Deaf:
    def __init__(self, model):
        pass
    def train_from_iterator(self, texts, trainer):
        list(texts)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(30, os._exit, (1,)).start()
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
tokenizers.Tokenizer = Deaf
"""
ENDLESS = """
import os
from mingpt.tools.prepare import job
def endless(*_):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        yield "some words"
job.sample = endless
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A long document, then short ones."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_bytes(mixed(30_000, 1).encode())
    write_documents(folder / "b.jsonl", [mixed(n * 13 % 900, n) for n in range(60)])
    return [folder / "a.txt", folder / "b.jsonl"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 500)
    monkeypatch.setattr(documents, "BATCH_BYTES", 5000)


@pytest.fixture(scope="module")
def undisturbed(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepared(*texts, "--out", out, *OPTIONS)
    assert len(list(out.glob("*.bin"))) > 4
    return out


@pytest.fixture
def words(texts: list[Path], tmp_path: Path) -> list[object]:
    return [*texts, "--out", tmp_path / "out", *OPTIONS]


def killed_at(call: int, words: list[object]) -> None:
    """Start a command that kills itself after its n-th write, fsync or rename."""
    done = run_apart(*words, before=AT_CALL.format(call=call, signal="SIGKILL"))
    assert done.returncode == -signal.SIGKILL, done.stderr


SLOW = [pytest.param(call, marks=pytest.mark.slow) for call in (2, 6, 11, 14, 19, 23, 31, 38, 44, 52)]


@pytest.mark.parametrize("call", [27, *SLOW])
def test_a_killed_command_goes_on_to_the_same_bytes(
    call: int, words: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    """What stands there meanwhile under its final name is as in the end, but for meta.json."""
    killed_at(call, words)
    there, whole = digests(tmp_path / "out"), digests(undisturbed)
    final = {name for name in there if not name.endswith(".partial")} - {"meta.json"}
    assert all(there[name] == whole[name] for name in final)
    assert "complete already" not in prepared(*words)
    assert digests(tmp_path / "out") == whole


def test_finished_shards_stay_and_damaged_ones_are_written_again(
    words: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    killed_at(46, words)
    record = json.loads((tmp_path / "out/prepare.json").read_text())
    assert len(record["shards"]) >= 2
    first, second = (tmp_path / "out" / f"train_0000{number}.bin" for number in range(2))
    written = first.stat().st_mtime_ns
    second.write_bytes(b"torn")
    prepared(*words)
    assert first.stat().st_mtime_ns == written
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_ctrl_c_is_one_line_and_the_command_goes_on(
    words: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    done = run_apart(*words, before=HEARD + AT_CALL.format(call=20, signal="SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted: the same command goes on from the last finished shard\n"
    assert list((tmp_path / "out").glob("*.partial")) == []
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


@pytest.mark.parametrize("training", [DEAF, ENDLESS], ids=["merges", "reading"])
def test_the_first_ctrl_c_ends_the_training_of_a_bpe(training: str, tmp_path: Path) -> None:
    # In the package's code, which obeys no signal, and where it asks for more text.
    (tmp_path / "a.txt").write_text(mixed(3000, 1))
    done = run_apart(tmp_path / "a.txt", "--out", tmp_path / "out", *OPTIONS, before=HEARD + training)
    line = "interrupted: the same command goes on from the last finished shard\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_is_a_sentence_and_the_command_goes_on(
    function: str, words: list[object], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(monkeypatch, function, "val_00000", errno.ENOSPC)
    assert "val_00000.bin cannot be written" in refused(*words)
    assert [path.name for path in (tmp_path / "out").glob("val*")] == []
    disk.broken = False
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_another_command_on_the_folder_is_refused(texts: list[Path], tmp_path: Path) -> None:
    """With the option that differs, both values, and no advice to remove what is there."""
    out = tmp_path / "out"
    prepared(*texts, "--out", out, *OPTIONS)
    begin, end = f"error: --out {out} holds the work of a command with ", "name another --out"
    for argv, difference in (
        (texts, "--tokenizer bpe, and this one has --tokenizer char"),
        ([*texts, *OPTIONS[:-1], 5000], "--shard_tokens 4000, and this one has --shard_tokens 5000"),
        ([texts[0], *OPTIONS], f"text 2 {texts[1]} of "),
        ([*texts[::-1], *OPTIONS], f"text 1 {texts[0]} of "),
    ):
        said = refused(*argv, "--out", out)
        assert said.startswith(begin + difference) and said.endswith(end) and "remove" not in said, said
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert refused(*texts, "--out", other).endswith("holds other files (notes.txt): name another --out")


def test_another_content_of_a_text_or_a_tokenizer_is_another_command(tmp_path: Path) -> None:
    text, tokenizer, out = tmp_path / "a.txt", tmp_path / "tokenizer.json", tmp_path / "out"
    text.write_text("one " * 100)
    tokenizer.write_bytes(cl100k_like("the sea " * 100))
    argv = [text, "--out", out, "--tokenizer", tokenizer]
    prepared(*argv)
    assert "complete already" in prepared(*argv)
    tokenizer.write_bytes(cl100k_like("another text " * 100))
    said = refused(*argv)
    assert f"a command with --tokenizer of sha256 {digests(out)['tokenizer.json']}, and" in said
    tokenizer.write_bytes(cl100k_like("the sea " * 100))
    text.write_text("two " * 101)
    said = refused(*argv)
    assert f"a command with text 1 {text} of 400 bytes, " in said and f"has text 1 {text} of 404" in said


@pytest.mark.parametrize("content", ['{"command": null}', "[]", "{", '{"command": {}, "shards": [3]}'])
def test_a_damaged_record_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "prepare.json").write_text(content)
    said = refused(ROOT / "data/README.md", "--out", tmp_path)
    assert said.startswith(f"error: {tmp_path}/prepare.json ") and said.endswith("name another --out")


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path / "out"):
        said = refused(ROOT / "data/README.md", "--out", tmp_path / "out")
    assert said.startswith("error: another command writes to --out")
