"""What is written is read back by TensorBoard's own EventAccumulator."""

import dataclasses
import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.events import read_scalars, read_texts
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.report.tensorboard import TensorBoard, event_files, fenced, read_events
from mingpt.report.tracker import Follower

Starts = list[tuple[int, str]]
FRESH: Starts = [(0, "")]


def start(run_dir: Path, step: int = 0, starts: Starts = FRESH, **more: Any) -> Follower:
    """A generation that goes on from `step`; `starts` are those of all generations."""
    is_fresh = len(starts) == 1
    run = dataclasses.replace(make_run(run_dir, is_fresh=is_fresh), starts=starts, **more)
    sink = Follower(run, TensorBoard(run))
    sink.rewind(step)
    return sink


def log_steps(sink: Follower, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        sink.log(step, {"train/loss": factor * step, "lr": 0.5})
        if step % 5 == 0:
            sink.log(step, {"val/loss": factor * step})
            sink.log_text(step, "sample", f"text of step {step}")
    sink.flush()


def write_metrics(run_dir: Path, steps: range) -> None:
    lines = []
    for step in steps:
        lines.append({"step": step, "train/loss": float(step), "lr": 0.5})
        if step % 5 == 0:
            lines.append({"step": step, "val/loss": float(step)})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_scalars_texts_and_the_start_are_read_back(tmp_path: Path) -> None:
    sink = start(tmp_path)
    log_steps(sink, range(11))
    sink.close()
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(step, float(step)) for step in range(11)]
    assert scalars["val/loss"] == [(0, 0.0), (5, 5.0), (10, 10.0)]
    assert scalars["lr"] == [(step, 0.5) for step in range(11)]
    assert scalars["generation"] == [(0, 1.0)]
    assert read_texts(tmp_path)["sample"] == [(step, f"```\ntext of step {step}\n```") for step in (0, 5, 10)]


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """So that SIGKILL loses nothing of it. Nothing is closed here."""
    log_steps(start(tmp_path), range(4))
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [0, 1, 2, 3]


def test_after_two_restarts_each_step_is_there_once_and_as_the_last_generation_saw_it(tmp_path: Path) -> None:
    log_steps(start(tmp_path), range(13))
    write_metrics(tmp_path, range(11))
    starts = [(0, ""), (10, "worker 1 vanished at step 12")]
    log_steps(start(tmp_path, 10, starts), range(11, 18), factor=2.0)
    write_metrics(tmp_path, range(11))
    starts.append((10, "worker 0 vanished at step 17"))
    sink = start(tmp_path, 10, starts)
    log_steps(sink, range(11, 16), factor=3.0)
    sink.close()
    scalars = read_scalars(tmp_path)
    kept = [(step, float(step)) for step in range(11)]
    assert scalars["train/loss"] == [*kept, *[(step, 3.0 * step) for step in range(11, 16)]]
    assert scalars["val/loss"] == [(0, 0.0), (5, 5.0), (10, 10.0), (15, 45.0)]
    assert scalars["generation"] == [(0, 1.0), (10, 3.0)]
    texts = read_texts(tmp_path)
    assert [step for step, _ in texts["sample"]] == [0, 5, 10, 15]
    reasons = "generation 2: worker 1 vanished at step 12\n\ngeneration 3: worker 0 vanished at step 17"
    assert texts["restart"] == [(10, reasons)]


@pytest.mark.parametrize("tail", [b"\x20\0\0\0\0\0\0\0half of a record", bytes(64)])
def test_what_a_kill_has_lost_comes_from_metrics_jsonl(tail: bytes, tmp_path: Path) -> None:
    """The file may end with a part of a record, or with zeros after a power failure: that is cut."""
    log_steps(start(tmp_path), range(8))
    write_metrics(tmp_path, range(11))
    (path,) = event_files(tmp_path / "tensorboard")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    sink = start(tmp_path, 10, [(0, ""), (10, "all workers vanished")])
    sink.log(10, {"val/loss": 7.0})  # that of the start, once more
    log_steps(sink, range(11, 13))
    sink.close()
    assert path.read_bytes() == whole
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(step, float(step)) for step in range(13)]
    assert scalars["val/loss"] == [(0, 0.0), (5, 5.0), (10, 10.0)]


def test_turned_on_in_the_middle_of_a_run_it_holds_the_whole_of_it(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(11))
    starts = [(0, ""), (4, "all workers vanished at step 6"), (10, "finished at step 10")]
    sink = start(tmp_path, 10, starts)
    log_steps(sink, range(11, 13))
    sink.close()
    scalars = read_scalars(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == list(range(13))
    assert scalars["generation"] == [(0, 1.0), (4, 2.0), (10, 3.0)]


def test_a_generation_that_begins_at_0_again_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    log_steps(start(tmp_path), range(4))
    write_metrics(tmp_path, range(1))
    sink = start(tmp_path, 0, [(0, ""), (0, "worker 0 vanished at step 3")])
    log_steps(sink, range(2), factor=2.0)
    sink.close()
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(0, 0.0), (1, 2.0)] and scalars["val/loss"] == [(0, 0.0)]
    assert scalars["generation"] == [(0, 2.0)]
    assert [step for step, _ in read_texts(tmp_path)["sample"]] == [0]


def test_a_run_that_goes_back_further_forgets_the_starts_behind(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(11))
    log_steps(start(tmp_path, 10, [(0, ""), (10, "one")]), range(11, 13))
    write_metrics(tmp_path, range(6))
    sink = start(tmp_path, 5, [(0, ""), (10, "one"), (5, "another")])
    log_steps(sink, range(6, 8))
    sink.close()
    scalars = read_scalars(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == list(range(8))
    assert scalars["generation"] == [(0, 1.0), (5, 3.0)]
    (tmp_path / "another").mkdir()
    start(tmp_path / "another", 12, [(0, ""), (10, "one"), (5, "two"), (12, "three")]).close()
    assert read_scalars(tmp_path / "another")["generation"] == [(0, 1.0), (5, 3.0), (12, 4.0)]


def test_a_fresh_run_keeps_the_events_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        sink = start(tmp_path)
        log_steps(sink, range(3 * number))
        sink.close()
    (kept,) = [one for one in warnings_of(caplog) if "fresh run" in one]
    assert kept.endswith("tensorboard-old-1")
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == list(range(6))
    old = read_scalars(tmp_path, "tensorboard-old-1")["train/loss"]
    assert [step for step, _ in old] == [0, 1, 2]


def test_a_reader_that_follows_the_files_is_told_from_where_the_run_goes_on(tmp_path: Path) -> None:
    """It may have read what is cut from the files."""
    log_steps(start(tmp_path), range(8))
    start(tmp_path, 5, [(0, ""), (5, "")]).close()
    first, second = event_files(tmp_path / "tensorboard")
    assert first.name < second.name
    (purge,) = [event for _, event in read_events(second) if event.HasField("session_log")]
    assert purge.step == 6
    assert max(event.step for _, event in read_events(first)) == 5


def test_the_files_are_in_the_order_of_the_generations_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, now in enumerate([2e9, 1e9, 1e9]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        start(tmp_path, number, [(step, "") for step in range(number + 1)]).close()
    files = event_files(tmp_path / "tensorboard")
    assert [path.name.split(".")[3] for path in files] == ["2000000000", "2000000001", "2000000002"]


@pytest.mark.parametrize("partly", [False, True])
def test_a_disk_that_is_full_is_one_line_and_the_next_generation_fills_the_gap(
    partly: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = start(tmp_path)
    log_steps(sink, range(3))
    disk = FaultyDisk(monkeypatch, "write", "tfevents", partly=partly)
    log_steps(sink, range(3, 6))
    sink.close()
    folder = tmp_path / "tensorboard"
    assert warnings_of(caplog) == [
        f"report.tensorboard ({folder}) has failed (No space left on device): the run goes on without it"
    ]
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [0, 1, 2]
    (path,) = event_files(folder)
    assert max(end for end, _ in read_events(path)) == path.stat().st_size, "no part of a record is left"
    disk.broken = False
    write_metrics(tmp_path, range(6))
    start(tmp_path, 5, [(0, ""), (5, "")]).close()
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == list(range(6))


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file of this name")
    sink = start(tmp_path)
    log_steps(sink, range(3))
    sink.close()
    (line,) = warnings_of(caplog)
    assert line.endswith(f"has failed ({os.strerror(errno.EEXIST)}): the run goes on without it")


def test_an_absent_package_is_one_line_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    sink = start(tmp_path)
    log_steps(sink, range(3))
    sink.close()
    (line,) = warnings_of(caplog)
    assert "needs the package tensorboard, which is not installed" in line


def test_a_text_that_holds_a_fence_gets_a_longer_one() -> None:
    assert fenced("a ``` b") == "````\na ``` b\n````"
