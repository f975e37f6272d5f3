import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.golden import Golden
from support.runs import make_run

from mingpt.report import open_log
from mingpt.report.log import ConsoleSink

log = logging.getLogger("mingpt.something")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package's logger is as before after a test."""
    logger = logging.getLogger("mingpt")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    yield
    open_log(0, None)  # closes the file
    logger.setLevel(level)


def written(run_dir: Path) -> list[str]:
    """The messages in log.txt, without date and time."""
    return [line.split(" ", 2)[2] for line in (run_dir / "log.txt").read_text().splitlines()]


def test_a_full_disk_is_one_line_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    open_log(0, tmp_path)
    log.info("1")
    disk = FaultyDisk(monkeypatch, "write", "log.txt", partly=True)
    log.info("2")
    log.info("3")
    assert written(tmp_path) == ["1"]
    disk.broken = False
    log.info("4")
    shown = capsys.readouterr().err
    golden(shown)
    assert written(tmp_path) == shown.splitlines()


def test_a_worker_that_keeps_a_run_folder_writes_all_lines_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log(3, tmp_path)
    log.info("the plan")
    log.warning("no snapshots in memory")
    assert capsys.readouterr().err == "worker 3: no snapshots in memory\n"
    assert written(tmp_path) == ["the plan", "no snapshots in memory"]


def test_each_record_is_a_line_with_the_time_left_once_that_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """The steps before the first record do not count, since they are slow."""
    caplog.set_level(logging.INFO, "mingpt")
    sink, now = ConsoleSink(make_run(tmp_path, step=10)), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for step, seconds in ((12, 60.0), (14, 3.0), (16, 5.0)):
        now += seconds
        sink.log(step, {"train/loss": 2.5, "lr": 0.007, "tokens_per_s": 12345.6, "step_s": 9.0, "tokens": 9})
    sink.log(16, {"val/loss": 2.25, "val/bits_per_byte": 3.2})
    golden("\n".join(caplog.messages))
