"""A command that did not end leaves a folder that the command and the trainer refuse, or none at all."""

import errno
import shutil
import signal
from pathlib import Path

import pytest
from conftest import ROOT
from support.faults import FaultyDisk
from support.prepared import digests, mixed, prepared, refused, run_apart, write_documents

from mingpt.base.errors import UserError
from mingpt.data.shards import open_shards
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


@pytest.fixture
def words(texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(documents, "PIECE_BYTES", 500)
    monkeypatch.setattr(documents, "BATCH_BYTES", 5000)
    return [*texts, "--out", tmp_path / "out", *OPTIONS]


SLOW = [pytest.param(call, marks=pytest.mark.slow) for call in (4, 11, 23, 38)]


@pytest.mark.parametrize("call", [27, *SLOW])
def test_the_folder_of_a_killed_command_is_refused_until_it_is_removed(
    call: int, words: list[object], tmp_path: Path
) -> None:
    """The command kills itself after its n-th write, fsync or rename."""
    done = run_apart(*words, before=AT_CALL.format(call=call, signal="SIGKILL"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    out = tmp_path / "out"
    way_out = f"was interrupted: remove the folder {out} and run the same command again"
    assert way_out in refused(*words)
    with pytest.raises(UserError, match=way_out):
        open_shards(str(out), 0.1)
    shutil.rmtree(out)
    prepared(*words)
    assert len(list(out.glob("*.bin"))) == len(open_shards(str(out), 0.1).files) > 4


def test_ctrl_c_is_one_line(words: list[object], tmp_path: Path) -> None:
    done = run_apart(*words, before=HEARD + AT_CALL.format(call=20, signal="SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"interrupted: remove the folder {tmp_path}/out and run the same command again\n"
    assert list((tmp_path / "out").glob("*.partial")) == []


@pytest.mark.parametrize("training", [DEAF, ENDLESS], ids=["merges", "reading"])
def test_the_first_ctrl_c_ends_the_training_of_a_bpe(training: str, tmp_path: Path) -> None:
    # In the package's code, which obeys no signal, and where it asks for more text.
    (tmp_path / "a.txt").write_text(mixed(3000, 1))
    done = run_apart(tmp_path / "a.txt", "--out", tmp_path / "out", *OPTIONS, before=HEARD + training)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("interrupted: ") and done.stderr.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_is_a_sentence(
    function: str, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyDisk(monkeypatch, function, "val_00000", errno.ENOSPC)
    said = refused(*words)
    assert "val_00000.bin cannot be written" in said and f"remove the folder {tmp_path}/out and" in said
    assert [path.name for path in (tmp_path / "out").glob("val*")] == []


def test_a_folder_with_files_is_refused(texts: list[Path], tmp_path: Path) -> None:
    """Without advice to remove what is there."""
    out, other = tmp_path / "out", tmp_path / "other"
    prepared(*texts, "--out", out)
    whole = digests(out)
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for folder, name in ((out, "meta.json"), (other, "notes.txt")):
        said = refused(*texts, "--out", folder)
        assert said == f"error: --out {folder} holds files already ({name}): name another --out"
    assert digests(out) == whole


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path / "out"):
        said = refused(ROOT / "data/README.md", "--out", tmp_path / "out")
    assert said.startswith("error: another command writes to --out")
