import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.base.files import write_atomic
from mingpt.report.files import JsonlSink, SmallFile, read_records


def test_a_file_whose_folder_changed_hands_during_the_write_is_left_alone(tmp_path: Path) -> None:
    """The claim was valid before the storage hung, and is lost when the file would get its name."""
    path = tmp_path / "run.json"
    write_atomic(path, "the other job's")
    answers = [True, False]
    SmallFile(path, lambda: answers.pop(0)).write("ours")
    assert answers == [] and path.read_text() == "the other job's"


def test_the_latest_content_wins_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first write takes long, the caller does not wait, and contents in between are skipped."""
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


def test_records_are_read_one_at_a_time_and_a_damaged_line_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is not read at once: the first records come before a line that is written later."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nno record\n' + "".join(f'{{"step": {n}}}\n' for n in range(2, 50_000)))
    records = read_records(path)
    assert [record["step"] for record in itertools.islice(records, 3)] == [1, 2, 3]
    with open(path, "a") as file:
        file.write('{"step": 50000}\n')
    assert [record["step"] for record in records][-1] == 50_000
    assert list(read_records(tmp_path / "absent.jsonl")) == []
    assert "is not a record is ignored" in caplog.text


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in records_in(path)]


def log_losses(sink: JsonlSink, steps: range) -> None:
    for step in steps:
        sink.log(step, {"train/loss": float(step)})


def resumed(run_dir: Path, step: int) -> JsonlSink:
    return JsonlSink(replace(make_run(run_dir), first_step=step))


def test_a_resume_drops_the_records_past_its_step_which_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log_losses(JsonlSink(make_run(tmp_path)), range(1, 9))
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl")
    second = resumed(tmp_path, 5)
    assert steps_in(path) == [1, 2, 3, 4, 5] and disk.hits == 0
    disk.broken = False
    log_losses(second, range(6, 11))
    assert steps_in(path) == list(range(1, 11))


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 4.0}\n{"step": 2, "tra')
    resumed(tmp_path, 2).log(2, {"train/loss": 3.0})
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]
