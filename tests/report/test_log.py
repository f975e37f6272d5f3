import itertools
import logging
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.report import open_log
from mingpt.report.log import ConsoleSink

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


@pytest.mark.parametrize(("first", "left"), [(0, ("00:13", "00:25")), (10, ("00:08", "00:15"))])
def test_without_a_terminal_each_record_is_a_line_with_the_time_left_once_that_is_measured(
    first: int,
    left: tuple[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first steps of each generation do not count, since they are slow."""
    caplog.set_level(logging.INFO, "mingpt")
    sink, now = ConsoleSink(make_run(tmp_path, step=first)), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for step, seconds in enumerate((60.0, 2.0, 1.0, 0.5, 1.5), first + 1):
        now += seconds
        sink.on_step(step)
        sink.log(step, {"train/loss": 2.5, "lr": 0.007, "tokens_per_s": 12345.6, "step_s": 9.0, "tokens": 9})
    sink.log(step, {"val/loss": 2.25, "val/bits_per_byte": 3.2})
    ends = ["", "", "", *(f"  {time} left" for time in left)]
    assert caplog.messages == [
        *(
            f"step {first + 1 + n}/30  loss 2.5000  12,346 tok/s  lr 7.00e-03{end}"
            for n, end in enumerate(ends)
        ),
        f"step {step}/30  val/loss 2.2500  val/bits_per_byte 3.2000",
    ]


@pytest.mark.parametrize(
    ("columns", "steps", "rate", "left"), [(60, 340, 10_684, "01:25"), (80, 100_000, 1_380_000, "6:56:40")]
)
def test_a_narrow_terminal_has_room_for_the_bar_and_its_figures_and_the_file_has_the_lines(
    columns: int, steps: int, rate: int, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 0.5).__next__)
    first, step = steps // 2 - 9, steps // 2
    with open(screen, encoding="utf-8", newline="\n") as lines:
        with open(terminal, "w", encoding="utf-8") as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            open_log(0, tmp_path)
            sink = ConsoleSink(make_run(tmp_path, {"trainer.max_steps": steps}, step=first))
            for done in range(first + 1, step + 1):
                sink.on_step(done)
            sink.log(step, {"train/loss": 2.5, "lr": 0.007, "tokens_per_s": rate})
            sink.close()
        shown = lines.readline()
    bar, figures = shown.strip().rpartition("\r")[2].split(f"|{step}/{steps}  ")
    assert len(bar) >= 10 and len(f"{bar}|{step}/{steps}  {figures}") <= columns and "step" not in shown
    assert figures == f"loss 2.5000  {rate:,} tok/s  {left} left"
    assert written(tmp_path) == [
        f"step {step}/{steps}  loss 2.5000  {rate:,} tok/s  lr 7.00e-03  {left} left"
    ]
