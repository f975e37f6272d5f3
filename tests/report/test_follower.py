import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from support.runs import make_run

from mingpt.report import tracker
from mingpt.report.metrics import Values
from mingpt.report.tracker import Destination, EarlierRecords, Follower


class Recording(Destination):
    """Notes its calls; `faults` says what happens in a method instead."""

    label, package = "the test's", "package_of_the_test"

    def __init__(self, **faults: Callable[[], object]) -> None:
        self.faults = faults
        self.calls: list[Any] = []

    def called(self, name: str, *arguments: Any) -> None:
        if name in self.faults:
            self.faults[name]()
        self.calls.append((name, *arguments))

    def open(self, earlier: EarlierRecords) -> None:
        self.called("open", list(earlier))

    def log(self, step: int, values: Values) -> None:
        self.called("log", step, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.called("log_text", step, name, text)

    def flush(self) -> None:
        self.called("flush")

    def close(self) -> None:
        self.called("close")


@pytest.fixture
def block() -> Iterator[Callable[[], object]]:
    """Blocks whoever calls it until the test has ended."""
    ended = threading.Event()
    yield ended.wait
    ended.set()


def fail() -> None:
    raise ValueError("planted\nin two lines")


def leave() -> None:
    raise SystemExit("planted")


def lack() -> None:
    raise ModuleNotFoundError("No module named 'other'", name="other")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run_with(destination: Destination, folder: Path, first_step: int = 0) -> float:
    """Seconds that a run of two records takes."""
    began = time.monotonic()
    sink = Follower(make_run(folder), destination)
    sink.rewind(first_step)
    sink.log(1, {"train/loss": 2.0})
    sink.log_text(1, "sample", "To be")
    sink.flush()
    sink.log(2, {"train/loss": 1.0})
    sink.flush()
    sink.close()
    sink.log(3, {"train/loss": 0.5})
    sink.flush()
    sink.close()
    return time.monotonic() - began


def test_a_destination_is_told_everything_in_its_order_and_one_thread(tmp_path: Path) -> None:
    threads = set()
    names = ("open", "log", "log_text", "flush", "close")
    destination = Recording(**dict.fromkeys(names, lambda: threads.add(threading.get_ident())))
    run_with(destination, tmp_path)
    assert [call[0] for call in destination.calls] == [
        *("open", "log", "log_text", "flush", "log", "flush", "close")
    ]
    assert destination.calls[1] == ("log", 1, {"train/loss": 2.0})
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize("method", ["open", "log", "log_text", "flush", "close"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fail, "has failed (ValueError: planted): the run goes on without it"),
        (leave, "has failed (SystemExit: planted): the run goes on without it"),
        (lack, "needs the package other, which is not installed: the run goes on without it"),
    ],
)
def test_one_that_fails_is_one_line(
    method: str, fault: Callable[[], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = Recording(**{method: fault})
    assert run_with(destination, tmp_path) < 3
    assert warnings_of(caplog) == [f"the test's {reason}"]
    assert method not in [call[0] for call in destination.calls]


@pytest.mark.parametrize("method", ["open", "log", "flush", "close"])
def test_one_that_blocks_for_ever_is_given_up_with_one_line(
    method: str,
    block: Callable[[], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "FLUSH_S", 0.8)
    monkeypatch.setattr(tracker, "CLOSE_S", 0.5)
    assert run_with(Recording(**{method: block}), tmp_path) < 2.0, "a second flush must not wait"
    assert warnings_of(caplog) == [
        "the test's did not end within 0.5 s and is given up: it may lack the last values"
    ]


def test_a_full_queue_leaves_values_out_and_says_so_once(
    block: Callable[[], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "MAX_QUEUED", 10)
    monkeypatch.setattr(tracker, "CLOSE_S", 0.2)
    sink = Follower(make_run(tmp_path), Recording(log=block))
    sink.rewind(0)
    began = time.monotonic()
    for step in range(100):
        sink.log(step, {"train/loss": 1.0})
    assert time.monotonic() - began < 0.1
    sink.close()
    assert warnings_of(caplog) == [
        "the test's is too slow: 10 records wait, and those that come now are left out"
    ]


def test_a_slow_one_does_not_hold_up_whoever_logs(tmp_path: Path) -> None:
    destination = Recording(log=lambda: time.sleep(0.05))
    sink = Follower(make_run(tmp_path), destination)
    sink.rewind(0)
    began = time.monotonic()
    for step in range(20):
        sink.log(step, {"train/loss": 1.0})
    assert time.monotonic() - began < 0.05
    sink.close()
    assert len(destination.calls) == 22, "the end of the run waits until all is told"


def test_nothing_is_told_once_the_run_folder_is_another_jobs(tmp_path: Path) -> None:
    mine = [True]
    destination = Recording()
    sink = Follower(dataclasses.replace(make_run(tmp_path), may_write=lambda: mine[0]), destination)
    sink.rewind(0)
    sink.log(1, {"train/loss": 1.0})
    wait_until(lambda: len(destination.calls) == 2)
    mine[0] = False
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    assert [call[0] for call in destination.calls] == ["open", "log"]


def test_earlier_records_are_those_up_to_the_step_of_the_start(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": step + 0.5}) + "\n" for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = make_run(tmp_path, is_fresh=False)
    earlier = EarlierRecords(run, 4)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "val/loss": 1.0}\n{"step": 5, "tr')  # of this generation
    assert list(earlier) == [(step, {"train/loss": step + 0.5}) for step in range(4)]
    assert list(EarlierRecords(run, 0)) == [], "the records of step 0 come again"
