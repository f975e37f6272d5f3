"""Trackers, by a stand-in with wandb's interface, and TensorBoard, whose EventAccumulator reads events."""

import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from support.events import read_scalars
from support.runs import make_run

from mingpt.config import to_dict
from mingpt.extras import trackers
from mingpt.extras.trackers import InThread, TensorBoard, Tracker
from mingpt.report.metrics import Sink


@pytest.mark.parametrize("where", ["make_sink", "log", "close"])
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (SystemExit("planted\nin two lines"), "fails (SystemExit: planted): the run goes on without it"),
        (None, "did not end within 0.5 s: it may lack the last values"),
    ],
)
def test_a_tracker_that_fails_or_blocks_for_ever_is_one_line_and_gets_no_more_values(
    where: str,
    fault: BaseException | None,
    line: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
    ended, make_sink, began = threading.Event(), Mock(return_value=Mock(spec=Sink)), time.monotonic()
    failing = make_sink if where == "make_sink" else getattr(make_sink.return_value, where)
    failing.side_effect = fault or (lambda *_: ended.wait())
    follower = InThread(make_run(tmp_path), "the test's", make_sink)
    follower.log(1, {"train/loss": 2.0})
    follower.log(2, {"train/loss": 1.0})
    follower.close()
    assert time.monotonic() - began < 3
    assert (caplog.messages, failing.call_count) == ([f"the test's {line}"], 1)
    ended.set()
    follower.thread.join()  # else its line might come in the next test


def test_after_restarts_tensorboard_shows_each_step_as_the_last_generation_saw_it(tmp_path: Path) -> None:
    """Each event is in the file at once, so that SIGKILL loses none: no generation but the last closes."""
    for generation, first_step, last_step in ((1, 0, 12), (2, 10, 17), (3, 10, 15)):
        sink = TensorBoard(make_run(tmp_path, step=first_step))
        for step in range(first_step + 1, last_step + 1):
            sink.log(step, {"train/loss": float(generation)})
        assert read_scalars(tmp_path)["train/loss"][-1] == (last_step, float(generation))
    sink.close()
    assert read_scalars(tmp_path)["train/loss"] == [
        (step, 1.0 if step <= 10 else 3.0) for step in range(1, 16)
    ]
    sink = TensorBoard(make_run(tmp_path))  # a new start, whose step 0 comes again
    sink.log(0, {"train/loss": 4.0})
    assert read_scalars(tmp_path)["train/loss"] == [(0, 4.0)]


def test_wandb_shows_all_generations_as_one_run_and_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step that wandb lacks is `step` of the run that its `init` returns."""
    wandb = Mock(spec=["init", "log", "finish"])
    wandb.init.return_value.step = 12
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("os.environ", {})  # without a user's settings of wandb
    tracked: dict[str, Any] = {"report.tracker": "wandb"}
    run = make_run(tmp_path / "my project" / "run", tracked, run_id="0123456789abcdef")
    follower = InThread(run, "wandb", Tracker)
    for step in (11, 12):
        follower.log(step, {"train/loss": 2.5})
    follower.close()
    named = {"project": "my project", "name": "run-01234567", "id": "0123456789abcdef"}
    assert wandb.init.mock_calls[0] == call(resume="allow", config=to_dict(run.config), **named)
    assert wandb.log.mock_calls == [call({"train/loss": 2.5}, step=12)]
    assert wandb.mock_calls[-1] == call.finish()
