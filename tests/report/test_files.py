import errno
import itertools
import threading
from pathlib import Path

import pytest
from support.faults import FaultyDisk

from mingpt.base.files import write_atomic
from mingpt.report.files import LineFile, SmallFile, read_records

FULL = "No space left on device"


def append(file: LineFile, *lines: str) -> None:
    for line in lines:
        file.write(f"{line}\n".encode())


def test_a_small_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "before", sync="file")
    for function in ("write", "fsync", "replace"):
        with monkeypatch.context() as patch:
            disk = FaultyDisk(patch, function, "run.json", partly=function == "write")
            with pytest.raises(OSError, match=FULL):
                write_atomic(path, "after", sync="file")
            assert disk.hits == 1
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path], "a partial file would take room"


def test_a_small_file_is_reported_once_and_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = SmallFile(tmp_path / "run.json")
    disk = FaultyDisk(monkeypatch, "fsync", "run.json")
    file.write("1")
    file.write("2")
    assert file.unwritten == "2"
    disk.broken = False
    file.retry()
    file.write("3")
    assert (tmp_path / "run.json").read_text() == "3" and file.unwritten is None
    path = tmp_path / "run.json"
    assert caplog.messages == [
        f"{path} cannot be written ({FULL}): training goes on, and it is tried again",
        f"{path} is written again",
    ]


def test_a_file_whose_folder_changed_hands_during_the_write_is_left_alone(tmp_path: Path) -> None:
    """The claim was there before the storage hung, and is gone when the file would get its name."""
    path = tmp_path / "run.json"
    write_atomic(path, "the other job's")
    answers = [True, False]
    SmallFile(path, lambda: answers.pop(0)).write("ours")
    assert answers == [] and path.read_text() == "the other job's"


def test_the_latest_content_wins_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write takes long: the caller does not wait, and the contents in between are skipped."""
    file, begun, go_on = SmallFile(tmp_path / "run.json"), threading.Event(), threading.Event()
    written = []

    def slow_replace(path: Path, content: str, **_: object) -> None:
        begun.set()
        assert go_on.wait(30)
        written.append(content)

    monkeypatch.setattr("mingpt.report.files.write_atomic", slow_replace)
    file.write_in_background("1")
    assert begun.wait(30)
    for number in range(2, 100):
        file.write_in_background(str(number))
    go_on.set()
    file.write("last")
    assert (written[0], written[-1]) == ("1", "last")
    assert len(written) <= 3


@pytest.mark.parametrize("function", ["open", "write", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_lines_that_cannot_be_written_wait_and_keep_their_order(
    function: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "lines.txt"
    file = LineFile(path)
    append(file, "first")
    file.close()
    disks = [FaultyDisk(monkeypatch, "write", "lines.txt", code, partly=True)]
    if function != "write":
        disks.append(FaultyDisk(monkeypatch, function, "lines.txt", code))
    append(file, "second", "third", "a fourth one")
    if function != "ftruncate":
        assert path.read_text() == "first\n", "a part of a line is removed"
    disks[0].broken = False
    append(file, "fifth")
    for disk in disks:
        disk.broken = False
        assert disk.hits > 0 or (function == "open" and disk is disks[0])
    append(file, "sixth")
    assert path.read_text().splitlines() == ["first", "second", "third", "a fourth one", "fifth", "sixth"]
    assert len(caplog.messages) == 2
    assert "lines.txt cannot be written" in caplog.messages[0]
    assert caplog.messages[1] == f"{path} is written again"


def test_a_part_of_a_line_is_never_followed_by_another_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where it cannot be removed at once."""
    path = tmp_path / "lines.txt"
    file = LineFile(path)
    writing = FaultyDisk(monkeypatch, "write", "lines.txt", partly=True)
    removing = FaultyDisk(monkeypatch, "ftruncate", "lines.txt", errno.EIO)
    append(file, "0123456789")
    assert path.read_text() == "01234"
    writing.broken = False
    append(file, "second")
    assert path.read_text() == "01234"
    removing.broken = False
    append(file, "third")
    assert path.read_text() == "0123456789\nsecond\nthird\n"


def test_lines_that_may_be_lost_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "lines.txt", max_pending=2)
    disk = FaultyDisk(monkeypatch, "write", "lines.txt")
    append(file, "1", "2", "3")
    disk.broken = False
    append(file, "4")
    assert (tmp_path / "lines.txt").read_text() == "3\n4\n"


def test_what_has_to_be_done_before_is_tried_again_and_done_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "lines.txt", []

    def before() -> None:
        calls.append(path.exists())
        if len(calls) < 3:
            raise OSError(errno.EIO, "broken")

    file = LineFile(path, before=before)
    append(file, "1", "2")
    assert not path.exists()
    append(file, "3", "4")
    assert (calls, path.read_text()) == ([False] * 3, "1\n2\n3\n4\n")


def test_a_failed_sync_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = LineFile(tmp_path / "lines.txt")
    append(file, "1")
    disk = FaultyDisk(monkeypatch, "fsync", "lines.txt", errno.EIO)
    file.retry(sync=True)
    assert "cannot be written (Input/output error)" in caplog.text
    disk.broken = False
    file.retry(sync=True)
    assert caplog.messages[-1].endswith("is written again")


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    """The file is not held: what is read comes before a line that is written later."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nno record\n' + "".join(f'{{"step": {n}}}\n' for n in range(2, 50_000)))
    records = read_records(path)
    assert [record["step"] for record in itertools.islice(records, 3)] == [1, 2, 3]
    with open(path, "a") as file:
        file.write('{"step": 50000}\n')
    assert [record["step"] for record in records][-1] == 50_000
    assert list(read_records(tmp_path / "absent.jsonl")) == []
