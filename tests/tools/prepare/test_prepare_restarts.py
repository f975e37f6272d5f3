"""Killed at any moment, the same command goes on and leaves the bytes of one that nothing disturbed."""

import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from support.faults import FaultyDisk
from support.prepared import (
    digests,
    mixed,
    prepared,
    refused,
    run_apart,
    run_prepare,
    sentence,
    write_documents,
)
from support.vocabularies import small_bpe

from mingpt.tools.prepare.documents import Encoder
from mingpt.tools.prepare.folder import open_folder

OPTIONS = ["--tokenizer", "bpe", "--vocab_size", 300, "--shard_tokens", 4000]
SMALL = """
from mingpt.tools.prepare import documents
documents.PIECE_BYTES, documents.PIECE_CHARACTERS = 3001, 500
documents.BATCH_CHARACTERS, documents.SHORTEST_CUT = 5000, 700
"""
AT_CALL = (
    SMALL
    + """
import io, os, signal
calls = 0
def count(function):
    def counted(*words):
        global calls
        calls += 1
        if calls == {call} and {before}:
            os.kill(os.getpid(), signal.{signal})
        done = function(*words)
        if calls == {call}:
            os.kill(os.getpid(), signal.{signal})
        return done
    return counted
class File(io.FileIO):
    write = count(io.FileIO.write)
os.replace, os.fsync, io.FileIO = count(os.replace), count(os.fsync), File
"""
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A long document, then short ones."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_bytes(mixed(30_000, 1).encode())
    write_documents(folder / "b.jsonl", [mixed(n * 13 % 900, n) for n in range(60)])
    return [folder / "a.txt", folder / "b.jsonl"]


@pytest.fixture(scope="module")
def undisturbed(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepared(*texts, "--out", out, *OPTIONS)
    assert len(list(out.glob("*.bin"))) > 4
    return out


def killed_at(call: int, before: bool, words: list[object]) -> int:
    """Exit code of a command that kills itself before or after its n-th write, fsync or rename."""
    code = AT_CALL.format(call=call, before=before, signal="SIGKILL")
    return run_apart(*words, before=code).returncode


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("call", "before"),
    [pytest.param(9, True, marks=SLOW), (22, False), pytest.param(35, True, marks=SLOW)],
)
def test_a_killed_command_goes_on_to_the_same_bytes(
    call: int, before: bool, texts: list[Path], undisturbed: Path, tmp_path: Path
) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    assert killed_at(call, before, words) == -signal.SIGKILL
    assert "complete already" not in prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


@pytest.mark.slow
def test_killed_at_every_other_moment_it_goes_on_to_the_same_bytes(
    texts: list[Path], undisturbed: Path, tmp_path: Path
) -> None:
    """What stands there meanwhile under its final name is as in the end, but for meta.json."""
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    moments, code = 1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        moments += 2
        code = killed_at(moments, False, words)
        if code == -signal.SIGKILL:
            there = digests(tmp_path / "out")
            final = {name for name in there if not name.endswith(".partial")} - {"meta.json"}
            assert all(there[name] == digests(undisturbed)[name] for name in final)
            prepared(*words)
            assert digests(tmp_path / "out") == digests(undisturbed)
    assert code == 0 and moments > 50


@pytest.mark.slow
def test_killed_again_and_again_it_goes_on(texts: list[Path], undisturbed: Path, tmp_path: Path) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    for _ in range(2):
        assert killed_at(24, False, words) == -signal.SIGKILL
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_finished_shards_are_not_encoded_again(
    texts: list[Path], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    assert killed_at(40, False, words) == -signal.SIGKILL
    finished = len(list((tmp_path / "out").glob("train_*.bin")))
    assert finished >= 2
    encoded = 0
    encode = Encoder.encode

    def counted(self: Encoder, texts: list[str], ends: list[bool]) -> np.ndarray:
        nonlocal encoded
        tokens = encode(self, texts, ends)
        encoded += len(tokens)
        return tokens

    monkeypatch.setattr(Encoder, "encode", counted)
    prepared(*words)
    total = sum((path.stat().st_size - 1024) // 2 for path in undisturbed.glob("*.bin"))
    assert encoded <= total - 4000 * finished + 5000
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_a_lost_shard_is_written_again(texts: list[Path], undisturbed: Path, tmp_path: Path) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    assert killed_at(40, False, words) == -signal.SIGKILL
    (tmp_path / "out/train_00001.bin").write_bytes(b"torn")
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_ctrl_c_is_one_line_and_the_command_goes_on(
    texts: list[Path], undisturbed: Path, tmp_path: Path
) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    # A shell that starts the tests in the background has the signal ignored, which children inherit.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = run_apart(*words, before=heard + AT_CALL.format(call=20, before=True, signal="SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted: the same command goes on from the last finished shard\n"
    assert list((tmp_path / "out").glob("*.partial")) == []
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_a_file_size_limit_is_a_sentence_and_the_command_goes_on(
    texts: list[Path], undisturbed: Path, tmp_path: Path
) -> None:
    """As on a full disk, the operating system refuses to write on."""
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (7000, 7000))"
    said = sentence(run_apart(*words, before=limit))
    assert "cannot be written: File too large" in said and "the same command goes on" in said
    prepared(*words)
    assert digests(tmp_path / "out") == digests(undisturbed)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_is_a_sentence_and_the_command_goes_on(
    function: str,
    code: int,
    texts: list[Path],
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*texts, "--out", tmp_path / "out", *OPTIONS]
    disk = FaultyDisk(monkeypatch, function, "val_00000", code)
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
        (
            [*texts, *OPTIONS, "--val_fraction", 0.2],
            "--val_fraction 0.1, and this one has --val_fraction 0.2",
        ),
        ([texts[0], *OPTIONS], "2 files, and this one has 1"),
        ([*texts[::-1], *OPTIONS], f"{texts[0]}, and this one has {texts[1]} in its place"),
    ):
        said = refused(*argv, "--out", out)
        assert said.startswith(begin + difference) and said.endswith(end) and "remove" not in said, said
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert refused(*texts, "--out", other).endswith("holds other files (notes.txt): name another --out")
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_a_text_that_changed_is_another_command(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one " * 100)
    prepared(tmp_path / "a.txt", "--out", tmp_path / "out")
    (tmp_path / "a.txt").write_text("two " * 101)
    said = refused(tmp_path / "a.txt", "--out", tmp_path / "out")
    assert f"a command with {tmp_path}/a.txt of 400 bytes, " in said and "now it has 404 bytes, " in said


def test_another_content_of_the_tokenizers_file_is_another_command(tmp_path: Path) -> None:
    """Before the first command ends, and after."""
    path, out = tmp_path / "tokenizer.json", tmp_path / "out"
    path.write_bytes(small_bpe("the sea " * 100))
    argv = [ROOT / "data/README.md", "--out", out, "--tokenizer", path]
    prepared(*argv)
    assert "complete already" in prepared(*argv)
    path.write_bytes(small_bpe("another text " * 100))
    said = refused(*argv)
    assert f"the work of a command with --tokenizer {path} of sha256 " in said
    assert digests(out)["tokenizer.json"][:12] in said and said.endswith("name another --out")


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("train_00000.bin", Path.unlink, "is missing: put it back"),
        ("val_00000.bin", lambda path: path.write_bytes(path.read_bytes()[:-2]), "bytes, and meta.json says"),
        ("tokenizer.json", Path.unlink, "is missing: put it back"),
        (
            "tokenizer.json",
            lambda path: path.write_bytes(path.read_bytes() + b" "),
            "is not that of meta.json",
        ),
        ("meta.json", Path.unlink, "is missing: put it back"),
        ("meta.json", lambda path: path.write_text("{"), "is damaged"),
    ],
    ids=["no shard", "short shard", "no tokenizer", "another tokenizer", "no meta", "damaged meta"],
)
def test_a_finished_folder_that_is_no_longer_whole_is_told(
    name: str, damage: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    argv = [ROOT / "data/README.md", "--out", tmp_path / "out"]
    prepared(*argv)
    damage(tmp_path / "out" / name)
    said = refused(*argv)
    assert said.startswith(f"error: {tmp_path}/out/{name} ") and expected in said and "another --out" in said


@pytest.mark.parametrize(
    "content",
    ['{"command": null}', "{}", "[]", "{", '{"command": {}, "shards": [3]}', '{"command": {"files": 3}}'],
)
def test_a_damaged_record_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "prepare.json").write_text(content)
    said = refused(ROOT / "data/README.md", "--out", tmp_path)
    assert said.startswith(f"error: {tmp_path}/prepare.json ") and said.endswith("name another --out")


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path / "out"):
        said = refused(ROOT / "data/README.md", "--out", tmp_path / "out")
    assert said.startswith("error: another command writes to --out")
    assert run_prepare(ROOT / "data/README.md", "--out", tmp_path / "out").returncode == 0
