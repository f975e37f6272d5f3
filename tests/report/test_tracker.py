"""Trackers, by a stand-in with wandb's interface, and TensorBoard, whose EventAccumulator reads events."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from support.events import read_scalars, read_texts
from support.runs import make_run

from mingpt.report import tracker
from mingpt.report.metrics import RunInfo
from mingpt.report.tracker import Destination, Follower, TensorBoard, Tracker

SETTINGS = {"seed": 1, "data": {"path": "s3://***@bucket/text"}}


def make_destination(first_missing: int = 0, faults: dict[str, Any] | None = None) -> Mock:
    """A destination that records its calls; `faults` are the side effects of methods."""
    destination = Mock(spec=Destination, label="the test's")
    destination.open.return_value = first_missing
    for method, fault in (faults or {}).items():
        getattr(destination, method).side_effect = fault
    return destination


@pytest.fixture
def block() -> Iterator[Callable[..., object]]:
    """A function that blocks its callers until the test has ended."""
    ended = threading.Event()
    yield lambda *_: ended.wait()
    ended.set()


def run_with(destination: Destination, folder: Path) -> float:
    """The seconds that a run of two records takes."""
    began = time.monotonic()
    sink = Follower(make_run(folder), destination)
    sink.log(1, {"train/loss": 2.0})
    sink.log_text(1, "sample", "To be")
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    sink.log(3, {"train/loss": 0.5})
    sink.close()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("method", "fault", "reason"),
    [
        ("open", ModuleNotFoundError("no", name="other"), "needs the package other, which is not installed"),
        ("log", ValueError("planted\nin two lines"), "has failed (ValueError: planted)"),
        ("close", SystemExit("planted"), "has failed (SystemExit: planted)"),
    ],
)
def test_one_that_fails_is_one_line_and_gets_no_more_values(
    method: str, fault: BaseException, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = make_destination(faults={method: fault})
    assert run_with(destination, tmp_path) < 3
    assert caplog.messages == [f"the test's {reason}: the run goes on without it"]
    assert destination.mock_calls[-1][0] == method


@pytest.mark.parametrize("method", ["open", "log", "close"])
def test_one_that_blocks_for_ever_is_given_up_with_one_line(
    method: str,
    block: Callable[..., object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_S", 0.5)
    assert run_with(make_destination(faults={method: block}), tmp_path) < 2.0
    assert caplog.messages == [
        "the test's did not end within 0.5 s and is given up: it may lack the last values"
    ]


def test_a_full_queue_leaves_values_out_and_says_so_once(
    block: Callable[..., object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "MAX_QUEUED", 10)
    monkeypatch.setattr(tracker, "CLOSE_S", 0.2)
    sink = Follower(make_run(tmp_path), make_destination(faults={"log": block}))
    for step in range(100):
        sink.log(step, {"train/loss": 1.0})
    assert sink.tasks.qsize() <= 10
    sink.close()
    assert caplog.messages == [
        "the test's is too slow: 10 records wait, and those that come now are left out"
    ]


def test_nothing_is_told_once_the_run_folder_is_another_jobs(tmp_path: Path) -> None:
    answers = [True, False]
    destination = make_destination()
    sink = Follower(replace(make_run(tmp_path), may_write=lambda: answers.pop(0)), destination)
    sink.log(1, {"train/loss": 1.0})
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    assert destination.mock_calls == [call.open(0), call.log(1, {"train/loss": 1.0})]


def resumed(run_dir: Path, step: int, generation: int = 2) -> RunInfo:
    """A run that goes on from `step`; its metrics.jsonl has a record of each step up to 12."""
    records = [{"step": step, "train/loss": float(step)} for step in range(13)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    end = "worker 1 vanished at step 12; resumed from 10 with 1 worker"
    run = replace(make_run(run_dir), first_step=step)
    return replace(run, generation=generation, previous_end=end)


def log_steps(run: RunInfo, steps: range, factor: float = 1.0) -> None:
    sink = Follower(run, TensorBoard(run))
    for step in steps:
        sink.log(step, {"train/loss": factor * step})
        if step % 5 == 0:
            sink.log_text(step, "sample", f"text of step {step}")
    sink.close()


def test_after_restarts_tensorboard_shows_each_step_as_the_last_generation_saw_it(tmp_path: Path) -> None:
    log_steps(make_run(tmp_path), range(13))
    log_steps(resumed(tmp_path, 10), range(11, 18), factor=2.0)
    log_steps(resumed(tmp_path, 10, generation=3), range(11, 16), factor=3.0)
    scalars, texts = read_scalars(tmp_path), read_texts(tmp_path)
    kept = [(step, float(step)) for step in range(11)]
    assert scalars["train/loss"] == [*kept, *[(step, 3.0 * step) for step in range(11, 16)]]
    assert scalars["generation"] == [(0, 1.0), (10, 2.0), (10, 3.0)]
    # The accumulator does not purge texts, but TensorBoard's pages do.
    assert {step: text.strip() for step, text in texts["sample"]}[5] == "text of step 5"
    assert "generation 2: worker 1 vanished at step 12" in dict(texts["restart"][:1])[10]
    log_steps(replace(resumed(tmp_path, 0), generation=4), range(2), factor=4.0)
    assert read_scalars(tmp_path)["train/loss"] == [(0, 0.0), (1, 4.0)]


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """SIGKILL then loses no event. Nothing is closed here."""
    destination = TensorBoard(make_run(tmp_path))
    destination.open(0)
    destination.log(1, {"train/loss": 1.0})
    assert read_scalars(tmp_path)["train/loss"] == [(1, 1.0)]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A stand-in for wandb: its run's `step` is the first step that it lacks."""
    module = Mock(spec=["init", "log", "finish", "Html"])
    module.init.return_value.step = 0
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def follow(run: RunInfo) -> Follower:
    run = replace(run, run_id="0123456789abcdef", settings=SETTINGS)
    return Follower(run, Tracker(run, "wandb"))


def test_a_run_is_told_of_with_its_name_and_settings(
    tmp_path: Path, wandb: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "my project" / "run"
    sink = follow(make_run(run_dir))
    sink.log(1, {"train/loss": 2.5, "lr": 0.1})
    sink.log_text(1, "sample", "<To be>\n")
    sink.close()
    named = {"project": "my-project", "name": "run-01234567", "id": "0123456789abcdef", "dir": str(run_dir)}
    assert wandb.mock_calls == [
        call.init(resume="allow", config=SETTINGS, **named),
        call.log({"train/loss": 2.5, "lr": 0.1, "generation": 1}, step=1),
        call.Html("<pre>&lt;To be&gt;\n</pre>"),
        call.log({"sample": wandb.Html.return_value}, step=1),
        call.finish(),
    ]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", "/scratch")
    follow(make_run(tmp_path)).close()
    assert [wandb.init.call_args.kwargs[name] for name in ("project", "dir")] == ["mine", "/scratch"]


@pytest.mark.parametrize(("known", "sent"), [(8, [8, 9, 10, 11, 12]), (12, [12])])
def test_a_restart_sends_what_the_tracker_lacks_and_no_step_twice(
    known: int, sent: list[int], tmp_path: Path, wandb: Mock
) -> None:
    """The tracker may have lost some steps, or may have steps past the one from which the run goes on."""
    wandb.init.return_value.step = known
    sink = follow(resumed(tmp_path, 10))
    for step in (11, 12):
        sink.log(step, {"train/loss": float(step)})
    sink.close()
    assert wandb.log.mock_calls == [
        call({"train/loss": float(step), "generation": 2}, step=step) for step in sent
    ]
