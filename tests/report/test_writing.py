import itertools
import json
from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.base.files import write_atomic
from mingpt.report.writing import JsonlSink, ReportFile, read_records


def test_a_file_whose_folder_changed_hands_during_the_write_is_left_alone(tmp_path: Path) -> None:
    """The claim was valid before the storage hung, and is lost when the file would get its name."""
    path = tmp_path / "run.json"
    write_atomic(path, "the other job's")
    answers = [True, False]
    ReportFile(path, lambda: answers.pop(0)).replace("ours")
    assert answers == [] and path.read_text() == "the other job's"


def test_records_are_read_one_at_a_time_and_a_damaged_line_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is not read at once: the first records come before a line that is written later."""
    path = tmp_path / "metrics.jsonl"
    others = ["no record", "[1]", f'{{"step": {10**400}}}', f'{{"step": 1, "val/loss": {10**400}}}']
    path.write_text(
        '{"step": 1}\n'
        + "\n".join([*others, " " * (3 << 20), ""])
        + "".join(f'{{"step": {n}}}\n' for n in range(2, 50_000))
    )
    records = read_records(path)
    assert [record["step"] for record in itertools.islice(records, 3)] == [1, 2, 3]
    with open(path, "a") as file:
        file.write('{"step": 50000}\n')
    assert [record["step"] for record in records][-1] == 50_000
    assert list(read_records(tmp_path / "absent.jsonl")) == []
    assert caplog.text.count("is not a record is ignored") == len(others) + 4


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resume_drops_the_records_past_its_step_which_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that a crash has cut short is dropped, too."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)) + '{"step": 9, "tra')
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl")
    JsonlSink(make_run(tmp_path, step=8))
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    sink = JsonlSink(make_run(tmp_path, step=5))
    assert steps_in(path) == [1, 2, 3, 4, 5] and disk.hits == 0
    disk.broken = False
    for step in range(6, 11):
        sink.log(step, {"train/loss": float(step)})
    assert steps_in(path) == list(range(1, 11))
