import errno
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from support.faults import FaultyDisk, path_of

from mingpt.base.errors import UserError, meaning_of
from mingpt.base.files import atomic_file, fsync_path, retry, write_atomic
from mingpt.base.paths import refuse_pipe
from mingpt.base.system import OutOfTime


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
        if Path(target).parent == folder:  # threads of earlier tests write elsewhere
            calls.append("replace")
        replace(source, target)

    def note_fsync(handle: int) -> None:
        if Path(path_of(handle)).is_relative_to(folder):
            calls.append(f"fsync {Path(path_of(handle)).name}")

    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_fsync)
    write_atomic(folder / "file", "content", folder / "the.partial", sync)  # type: ignore[arg-type]
    assert calls == expected


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


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_a_folder_that_cannot_be_fsynced_is_an_error_only_if_its_disk_is_broken(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyDisk(monkeypatch, "fsync", tmp_path.name, code)
    with nullcontext() if code == errno.EOPNOTSUPP else pytest.raises(OSError, match="Input/output"):
        fsync_path(tmp_path)


def test_a_path_that_cannot_be_looked_at_is_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it reports the error."""
    FaultyDisk(monkeypatch, "stat", "secret", errno.EACCES)
    refuse_pipe("/secret/a.yaml", "the configuration file")
