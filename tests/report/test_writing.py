from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.report.writing import JsonlSink, ReportFile, read_records

LINES = "".join(f'{{"step": {step}, "train/loss": {step}}}\n' for step in range(1, 9))


def test_a_file_whose_folder_changed_hands_during_the_write_is_left_alone(tmp_path: Path) -> None:
    """The claim was valid before the storage hung, and is lost when the file would get its name."""
    path, answers = tmp_path / "run.json", [True, False]
    path.write_text("the other job's")
    ReportFile(path, lambda: answers.pop(0)).replace("ours")
    assert answers == [] and path.read_text() == "the other job's"


def test_a_damaged_line_is_left_out_of_the_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = ["no record", "[1]", f'{{"step": {10**400}}}', f'{{"step": 1, "val/loss": {10**400}}}']
    path.write_text("\n".join(['{"step": 1}', *damaged, " " * (3 << 20), '{"step": 2}', ""]))
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_a_resume_drops_the_records_past_its_step_which_needs_no_room_and_knows_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that a crash or a full disk has cut short is dropped, too."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "val/loss": 3.5}\n' + LINES + '{"step": 9, "tra')
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl", partly=True)
    for step in (8, 5):
        sink = JsonlSink(make_run(tmp_path, step=step))
        assert [record["step"] for record in read_records(path)] == [1, *range(1, step + 1)]
        assert sink.last == {"val": {"step": 1, "val/loss": 3.5}, "train": {"step": step, "train/loss": step}}
    assert disk.hits == 0
    before = path.read_bytes()
    sink.log(6, {"train/loss": 6})
    assert disk.hits == 1 and path.read_bytes() == before
    disk.broken = False
    for step in range(7, 11):
        sink.log(step, {"train/loss": step})
    assert [record["train/loss"] for record in read_records(path) if "train/loss" in record] == [
        *range(1, 11)
    ]
