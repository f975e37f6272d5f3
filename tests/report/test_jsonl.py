import errno
import json
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.report.files import JsonlSink


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_losses(sink: JsonlSink, steps: range) -> None:
    for step in steps:
        sink.log(step, {"train/loss": float(step)})


def test_each_record_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(make_run(tmp_path))
    sink.log(0, {"val/loss": 4.5})
    sink.log(1, {"train/loss": 4.0, "a metric of another kind": 1e300})
    assert records(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/loss": 4.5},
        {"step": 1, "train/loss": 4.0, "a metric of another kind": 1e300},
    ]
    sink.flush()
    sink.close()


def test_rewinding_leaves_one_curve(tmp_path: Path) -> None:
    first = JsonlSink(make_run(tmp_path))
    first.rewind(0)
    log_losses(first, range(1, 9))
    second = JsonlSink(make_run(tmp_path, is_fresh=False))
    second.rewind(5)
    log_losses(second, range(6, 11))
    steps = [record["step"] for record in records(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 11))
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_going_back_to_the_start_drops_the_evaluation_before_the_first_step_too(tmp_path: Path) -> None:
    """It is done again."""
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.log(0, {"val/loss": 4.5})
    sink.log(1, {"train/loss": 4.0})
    sink.rewind(0)
    assert records(tmp_path / "metrics.jsonl") == []


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 4.0}\n{"step": 2, "tra')
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.rewind(2)
    sink.log(2, {"train/loss": 3.0})
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "is not a record is ignored" in caplog.text


def test_a_fresh_run_keeps_the_records_of_earlier_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        sink = JsonlSink(make_run(tmp_path))
        sink.rewind(0)
        sink.log(7, {"train/loss": float(number)})
    losses = {path.name: records(path)[0]["train/loss"] for path in tmp_path.iterdir()}
    assert losses == {"metrics-old-1.jsonl": 0.0, "metrics-old-2.jsonl": 1.0, "metrics.jsonl": 2.0}
    assert "this is a fresh run: the records of an earlier one are kept in" in caplog.text


def test_the_records_of_a_run_that_never_made_a_step_are_not_kept(tmp_path: Path) -> None:
    first = JsonlSink(make_run(tmp_path))
    first.log(0, {"val/loss": 4.5})
    second = JsonlSink(make_run(tmp_path))
    second.rewind(0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert records(tmp_path / "metrics.jsonl") == []


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in records(path)]


def test_records_that_do_not_fit_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(make_run(tmp_path))
    log_losses(sink, range(1, 4))
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl", partly=True)
    log_losses(sink, range(4, 7))
    assert steps_in(path) == [1, 2, 3]
    disk.broken = False
    sink.flush()
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert [message.split(" (")[0] for message in caplog.messages] == [
        f"{path} cannot be written",
        f"{path} is written again",
    ]


@pytest.mark.parametrize("function", ["open", "truncate"])
def test_records_past_the_step_are_not_followed_by_others_where_they_cannot_be_dropped(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log_losses(JsonlSink(make_run(tmp_path)), range(1, 9))
    disk = FaultyDisk(monkeypatch, function, "metrics.jsonl", errno.EIO)
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.rewind(5)
    log_losses(sink, range(6, 8))
    assert steps_in(path)[:5] == [1, 2, 3, 4, 5]
    assert steps_in(path) in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8])
    disk.broken = False
    sink.log(8, {"train/loss": 8.5})
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert records(path)[-1]["train/loss"] == 8.5


def test_going_back_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_losses(JsonlSink(make_run(tmp_path)), range(1, 9))
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl")
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.rewind(5)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert disk.hits == 0


def test_lines_among_others_that_do_not_belong_there_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 9}\nno record\n{"step": 2}\n{"step": 3}')
    before = path.read_bytes()
    disk = FaultyDisk(monkeypatch, "write", "metrics.jsonl.partial", partly=True)
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.rewind(3)
    sink.log(4, {"train/loss": 4.0})
    assert path.read_bytes() == before, "that needs room, and nothing is lost without it"
    disk.broken = False
    sink.log(5, {"train/loss": 5.0})
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_records_of_an_earlier_run_are_kept_although_they_cannot_be_renamed_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log_losses(JsonlSink(make_run(tmp_path)), range(1, 4))
    with monkeypatch.context() as patch:
        FaultyDisk(patch, "rename", "metrics.jsonl", errno.EIO)
        sink = JsonlSink(make_run(tmp_path))
        sink.rewind(0)
        sink.log(0, {"val/loss": 4.5})
        assert steps_in(path) == [1, 2, 3]
    sink.log(1, {"train/loss": 1.0})
    assert steps_in(path) == [0, 1]
    assert steps_in(tmp_path / "metrics-old-1.jsonl") == [1, 2, 3]


def test_a_record_that_comes_late_is_put_in_its_place(tmp_path: Path) -> None:
    """A worker was writing it when its storage hung; the others have computed that step again since."""
    path = tmp_path / "metrics.jsonl"
    steps = [1, 2, 3, 5, 4, 5, 6, 3]
    path.write_text("".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in steps))
    sink = JsonlSink(make_run(tmp_path, is_fresh=False))
    sink.rewind(6)
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4, 5, 6]
