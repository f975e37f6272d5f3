import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import make_run

from mingpt.report.jsonl import JsonlSink


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
