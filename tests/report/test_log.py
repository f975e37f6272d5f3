import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import FaultyDisk

from mingpt.report import open_log

log = logging.getLogger("mingpt.something")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the package's logger for other tests."""
    logger = logging.getLogger("mingpt")
    level = logger.level
    yield
    open_log(0, None)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(level)


def written(run_dir: Path) -> list[str]:
    """The messages in log.txt, without date and time."""
    return [line.split(" ", 2)[2] for line in (run_dir / "log.txt").read_text().splitlines()]


def test_a_full_disk_is_one_line_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines wait in memory; if there are more than MAX_WAITING_LINES, the oldest are lost."""
    monkeypatch.setattr("mingpt.report.log.MAX_WAITING_LINES", 3)
    open_log(0, tmp_path)
    log.info("1")
    disk = FaultyDisk(monkeypatch, "write", "log.txt", partly=True)
    log.info("2")
    log.info("3")
    assert written(tmp_path) == ["1"]
    disk.broken = False
    log.info("4")
    full = (
        f"{tmp_path}/log.txt cannot be written (No space left on device): training goes on, and it is tried"
    )
    again = f"{tmp_path}/log.txt is written again"
    assert written(tmp_path) == ["1", f"{full} again", "3", "4", again]
    assert capsys.readouterr().err.splitlines() == ["1", "2", f"{full} again", "3", "4", again]


def test_a_worker_that_keeps_a_run_folder_writes_all_lines_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log(3, tmp_path)
    log.info("the plan")
    log.warning("no snapshots in memory")
    assert capsys.readouterr().err == "worker 3: no snapshots in memory\n"
    assert written(tmp_path) == ["the plan", "no snapshots in memory"]


def test_the_file_is_left_alone_once_it_belongs_to_another_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [True, False]
    open_log(0, tmp_path)  # replaced by the next call, else each line would be there twice
    open_log(0, tmp_path, lambda: answers.pop(0))
    log.info("first")
    log.warning("second")
    assert written(tmp_path) == ["first"]
    assert capsys.readouterr().err == "first\nsecond\n"
