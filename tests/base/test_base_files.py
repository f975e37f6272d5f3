import contextlib
import errno
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock, call

import pydantic
import pytest
from support.faults import FaultyDisk, path_of

from mingpt.base.errors import UserError, meaning_of
from mingpt.base.files import (
    BadJson,
    atomic_file,
    check_json,
    decode_text,
    fsync_path,
    parse_json,
    read_json,
    retry,
    temporary_folder,
    write_atomic,
)
from mingpt.base.system import OutOfTime
from mingpt.base.urls import open_url


@pytest.mark.parametrize("function", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_file_of_before_and_no_partial_file(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    FaultyDisk(monkeypatch, function, "file", partly=function == "write")
    with pytest.raises(OSError, match="No space left on device"):
        write_atomic(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_an_error_or_a_refusal_before_the_rename_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"aft")
        raise KeyError
    write_atomic(path, "after", before_rename=lambda: False)
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("nothing", ["replace"]),
        ("file", ["fsync the.partial", "replace"]),
        ("folder", ["fsync the.partial", "replace", "fsync folder"]),
    ],
)
def test_a_file_is_durable_before_it_has_its_name_and_its_name_afterwards(
    sync: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls, replace = tmp_path / "folder", list[str](), os.replace
    folder.mkdir()

    def note_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    def note_fsync(handle: int) -> None:
        calls.append(f"fsync {Path(path_of(handle)).name}")

    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_fsync)
    write_atomic(folder / "file", "content", folder / "the.partial", sync)  # type: ignore[arg-type]
    assert calls == expected


@pytest.mark.parametrize(
    ("kind", "code", "system", "is_error"),
    [
        ("folder", errno.EINVAL, "Linux", False),  # an old CIFS mount
        ("folder", errno.ENOSYS, "Linux", False),
        ("folder", errno.EPERM, "Linux", False),
        ("folder", errno.EBADF, "Linux", False),
        ("folder", errno.EIO, "5.15.90.1-microsoft-standard-WSL2", False),
        ("folder", errno.EIO, "Linux", True),
        ("folder", errno.ENOSPC, "Linux", True),
        ("file", errno.EINVAL, "Linux", True),
    ],
)
def test_a_folder_that_cannot_be_fsynced_is_a_line_and_a_broken_disk_an_error(
    kind: str, code: int, system: str, is_error: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("platform.release", lambda: system)
    place = tmp_path if kind == "folder" else tmp_path / "file"
    (tmp_path / "file").touch()
    FaultyDisk(monkeypatch, "fsync", str(place), code)
    for _ in range(2):
        with pytest.raises(OSError) if is_error else contextlib.nullcontext():
            fsync_path(place)
    assert len(caplog.messages) == (not is_error)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (OSError(errno.EDQUOT, ""), "full"),
        (OSError(errno.ESTALE, ""), "may pass"),
        (OSError(errno.ETIMEDOUT, ""), "may pass"),
        (OutOfTime("not done"), "may pass"),
        (OSError(errno.EROFS, ""), "forbidden"),
        (OSError(errno.EOPNOTSUPP, ""), "cannot"),
        (OSError(errno.ENOENT, ""), ""),
        (OSError("no errno"), ""),
        (None, ""),
    ],
)
def test_what_an_errno_means(error: Exception | None, meaning: str) -> None:
    assert meaning_of(error) == meaning


def test_a_users_error_knows_whether_its_cause_may_pass_on_all_ranks() -> None:
    try:
        raise OSError(errno.ENOTCONN, "away")
    except OSError:
        error = UserError("run_dir is away")
    assert pickle.loads(pickle.dumps(error)).may_pass and not UserError("a mistake").may_pass


def test_work_is_tried_again_after_the_given_pauses_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [OSError(f"attempt {number}") for number in (1, 2, 3)]
    work, slept, told = Mock(side_effect=[*errors, 4]), Mock(), Mock()
    monkeypatch.setattr("time.sleep", slept)
    with pytest.raises(OSError, match="attempt 3"):
        retry(work, (0.5, 2.0), told)
    assert (slept.mock_calls, told.mock_calls) == ([call(0.5), call(2.0)], [call(errors[0]), call(errors[1])])
    assert retry(work, (0.5, 2.0), told) == 4 and slept.call_count == 2


def test_a_url_without_a_driver_is_one_sentence_that_names_it() -> None:
    with pytest.raises(UserError, match=r"^the data nowhere://x needs a driver that is not installed: "):
        open_url("nowhere://x", "the data nowhere://x")


@dataclass(frozen=True)
class Point:
    name: str
    x: pydantic.StrictInt
    more: tuple[str, ...] = ()


HOSTILE = {
    "empty": b"",
    "cut off": b'{"name": "a", "x": ',
    "no text": b"\xff\xfe",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested in a field": b'{"name": "a", "x": ' + b'{"x": ' * 100_000 + b"1" + b"}" * 100_001,
    "a number of too many digits": b'{"name": "a", "x": ' + b"1" * 10_000 + b"}",
    "another type": b'["a", 1]',
    "another type in a field": b'{"name": "a", "x": "1"}',
    "true for a number": b'{"name": "a", "x": true}',
    "a missing field": b'{"name": "a"}',
    "too large": b'{"name": "a", "x": 1}' + b" " * 2_000_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_json_that_is_not_as_it_should_be_is_one_error_of_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.base.files.MAX_JSON_BYTES", 2_000_000)
    (tmp_path / "file").write_bytes(HOSTILE[kind])
    with pytest.raises(BadJson) as caught:
        read_json(tmp_path / "file", Point)
    assert 0 < len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_json_becomes_what_it_is_asked_to_be_and_an_error_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"name": "\\udc80", "x": 1, "more": ["b"], "other": 2}')
    value = read_json(tmp_path / "file", Point)
    assert value == {"name": "\udc80", "x": 1, "more": ["b"], "other": 2}
    assert check_json(value | {"name": "a"}, Point) == Point("a", 1, ("b",))
    with pytest.raises(BadJson, match=r"^more\.1: Input should be a valid string$"):
        check_json({"name": "a", "x": 1, "more": ["b", 3]}, Point)


def test_a_byte_order_mark_is_no_part_of_a_text_or_of_json() -> None:
    assert decode_text("\ufeffmer \ufeff".encode()) == "mer \ufeff"
    assert parse_json(b"\xef\xbb\xbf[1]") == [1] and decode_text(b"a\0b") == "a\0b"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *(
            ("The king\n".encode(encoding), "^not UTF-8, but probably UTF-16 ")
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")
        ),
        ("海と空".encode("utf-16"), "^not UTF-8"),
        (b"a\xe9", r"^not UTF-8: byte 0xe9 at offset 1,001$"),
    ],
)
def test_what_is_not_utf_8_is_named_with_its_place(content: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        decode_text(content, 1000)


def test_without_a_place_for_temporary_files_one_sentence_names_tmpdir(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with temporary_folder("mingpt-") as folder:
        assert Path(folder).is_dir() and Path(folder).name.startswith("mingpt-")
    error = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"found in \['/tmp'\]\): set TMPDIR to a folder with room"):
        temporary_folder()
