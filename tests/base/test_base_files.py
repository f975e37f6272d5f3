import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pydantic
import pytest
from support.faults import FaultyDisk, path_of

from mingpt.base.errors import UserError
from mingpt.base.files import (
    BadJson,
    atomic_file,
    check_json,
    decode_text,
    parse_json,
    read_json,
    retry,
    temporary_folder,
    write_atomic,
)
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


def test_work_is_tried_again_after_the_given_pauses_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, told, attempts = list[float](), list[str](), list[int]()
    monkeypatch.setattr("time.sleep", slept.append)

    def work() -> int:
        attempts.append(1)
        if len(attempts) <= 3:
            raise OSError(f"attempt {len(attempts)}")
        return len(attempts)

    with pytest.raises(OSError, match="attempt 3"):
        retry(work, (0.5, 2.0), lambda error: told.append(str(error)))
    assert (slept, told) == ([0.5, 2.0], ["attempt 1", "attempt 2"])
    assert retry(work, (0.5, 2.0), lambda error: None) == 4 and len(slept) == 2


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
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_json_that_is_not_as_it_should_be_is_one_error_of_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(HOSTILE[kind])
    with pytest.raises(BadJson) as caught:
        read_json(tmp_path / "file", Point)
    assert 0 < len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_json_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text(f'{{"name": "{"a" * 100}", "x": 1}}')
    monkeypatch.setattr("mingpt.base.files.MAX_JSON_BYTES", 100)
    with pytest.raises(BadJson, match="more than 100 bytes"):
        read_json(tmp_path / "file", Point)


def test_json_becomes_what_it_is_asked_to_be_and_an_error_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"name": "\\udc80", "x": 1, "more": ["b"], "other": 2}')
    value = read_json(tmp_path / "file", Point)
    assert value == {"name": "\udc80", "x": 1, "more": ["b"], "other": 2}
    assert check_json(value | {"name": "a"}, Point) == Point("a", 1, ("b",))
    with pytest.raises(BadJson, match=r"^more\.1: Input should be a valid string$") as caught:
        check_json({"name": "a", "x": 1, "more": ["b", 3]}, Point)
    assert caught.value.place == ("more", 1)


def test_a_byte_order_mark_is_no_part_of_a_text_or_of_json() -> None:
    assert decode_text("\ufeffmer \ufeff".encode()) == "mer \ufeff"
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_encodings_of_unicode_are_named(encoding: str) -> None:
    with pytest.raises(ValueError, match="not UTF-8, but probably UTF-16"):
        decode_text("The king\n".encode(encoding))
    with pytest.raises(ValueError, match="not UTF-8"):
        decode_text("海と空".encode("utf-16"))


def test_a_byte_that_is_no_utf_8_is_named_with_its_place() -> None:
    assert decode_text(b"a\0b") == "a\0b"
    with pytest.raises(ValueError, match=r"^not UTF-8: byte 0xe9 at offset 1,001$"):
        decode_text(b"a\xe9", 1000)


def test_without_a_place_for_temporary_files_one_sentence_names_tmpdir(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with temporary_folder("mingpt-") as folder:
        assert Path(folder).is_dir() and Path(folder).name.startswith("mingpt-")
    assert not Path(folder).exists()
    error = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"found in \['/tmp'\]\): set TMPDIR to a folder with room"):
        temporary_folder()
