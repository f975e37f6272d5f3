"""With a stand-in that has wandb's interface; events are read back by TensorBoard's own EventAccumulator."""

import json
import logging
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from support.events import read_scalars, read_texts
from support.runs import make_run

from mingpt.report import tracker
from mingpt.report.metrics import RunInfo, Values
from mingpt.report.tracker import Destination, Follower, TensorBoard, Tracker

SETTINGS = {"seed": 1, "data": {"path": "s3://***@bucket/text"}}


class Recording(Destination):
    """Notes its calls; `faults` says what happens in a method instead."""

    label, package = "the test's", "package_of_the_test"

    def __init__(self, faults: dict[str, Callable[[], object]] | None = None, first_missing: int = 0) -> None:
        self.faults, self.first_missing = faults or {}, first_missing
        self.calls: list[Any] = []

    def called(self, name: str, *arguments: Any) -> None:
        if name in self.faults:
            self.faults[name]()
        self.calls.append((name, *arguments))

    def open(self, step: int) -> int:
        self.called("open", step)
        return self.first_missing

    def log(self, step: int, values: Values) -> None:
        self.called("log", step, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.called("log_text", step, name, text)

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


def run_with(destination: Destination, folder: Path) -> float:
    """Seconds that a run of two records takes."""
    began = time.monotonic()
    sink = Follower(make_run(folder), destination)
    sink.log(1, {"train/loss": 2.0})
    sink.log_text(1, "sample", "To be")
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    sink.log(3, {"train/loss": 0.5})
    sink.close()
    return time.monotonic() - began


def test_a_destination_is_told_everything_in_its_order_and_one_thread(tmp_path: Path) -> None:
    threads = set()
    names = ("open", "log", "log_text", "close")
    destination = Recording(dict.fromkeys(names, lambda: threads.add(threading.get_ident())))
    run_with(destination, tmp_path)
    assert destination.calls == [
        ("open", 0),
        ("log", 1, {"train/loss": 2.0}),
        ("log_text", 1, "sample", "To be"),
        ("log", 2, {"train/loss": 1.0}),
        ("close",),
    ]
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("method", "fault", "reason"),
    [
        ("open", lack, "needs the package other, which is not installed: the run goes on without it"),
        ("log", fail, "has failed (ValueError: planted): the run goes on without it"),
        ("close", leave, "has failed (SystemExit: planted): the run goes on without it"),
    ],
)
def test_one_that_fails_is_one_line(
    method: str, fault: Callable[[], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = Recording({method: fault})
    assert run_with(destination, tmp_path) < 3
    assert warnings_of(caplog) == [f"the test's {reason}"]
    assert method not in [call[0] for call in destination.calls]


@pytest.mark.parametrize("method", ["open", "log", "close"])
def test_one_that_blocks_for_ever_is_given_up_with_one_line(
    method: str,
    block: Callable[[], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_S", 0.5)
    assert run_with(Recording({method: block}), tmp_path) < 2.0
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
    sink = Follower(make_run(tmp_path), Recording({"log": block}))
    began = time.monotonic()
    for step in range(100):
        sink.log(step, {"train/loss": 1.0})
    assert time.monotonic() - began < 0.1
    assert sink.tasks.qsize() <= 10
    sink.close()
    assert warnings_of(caplog) == [
        "the test's is too slow: 10 records wait, and those that come now are left out"
    ]


def test_nothing_is_told_once_the_run_folder_is_another_jobs(tmp_path: Path) -> None:
    mine = [True]
    destination = Recording()
    sink = Follower(replace(make_run(tmp_path), may_write=lambda: mine[0]), destination)
    sink.log(1, {"train/loss": 1.0})
    wait_until(lambda: len(destination.calls) == 2)
    mine[0] = False
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    assert [call[0] for call in destination.calls] == ["open", "log"]


def resumed(run_dir: Path, step: int, generation: int = 2) -> RunInfo:
    """A run that goes on from `step`, and whose metrics.jsonl holds a record of each step up to 12."""
    records = [{"step": step, "train/loss": float(step)} for step in range(13)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    end = "worker 1 vanished at step 12; resumed from 10 with 1 worker"
    run = replace(make_run(run_dir, is_fresh=False), first_step=step)
    return replace(run, generation=generation, previous_end=end)


@pytest.mark.parametrize(
    ("step", "first_missing", "sent"), [(10, 0, range(11)), (10, 8, [8, 9, 10]), (10, 12, []), (0, 0, [])]
)
def test_what_it_lacks_up_to_the_step_of_the_start_comes_from_metrics_jsonl(
    step: int, first_missing: int, sent: list[int], tmp_path: Path
) -> None:
    destination = Recording(first_missing=first_missing)
    Follower(resumed(tmp_path, step), destination).close()
    assert destination.calls[1:-1] == [("log", one, {"train/loss": float(one)}) for one in sent]


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
    # The accumulator purges no texts, which TensorBoard's pages do.
    assert {step: text.strip() for step, text in texts["sample"]}[5] == "text of step 5"
    assert "generation 2: worker 1 vanished at step 12" in dict(texts["restart"][:1])[10]
    log_steps(replace(resumed(tmp_path, 0), generation=4), range(2), factor=4.0)
    assert read_scalars(tmp_path)["train/loss"] == [(0, 0.0), (1, 4.0)]


def test_tensorboard_turned_on_in_the_middle_of_a_run_holds_the_whole_of_it(tmp_path: Path) -> None:
    log_steps(resumed(tmp_path, 10), range(11, 13))
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == list(range(13))


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """So that SIGKILL loses nothing of it. Nothing is closed here."""
    destination = TensorBoard(make_run(tmp_path))
    destination.open(0)
    destination.log(1, {"train/loss": 1.0})
    assert read_scalars(tmp_path)["train/loss"] == [(1, 1.0)]


def test_a_folder_of_tensorboard_that_cannot_be_written_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file of this name")
    log_steps(make_run(tmp_path), range(3))
    (line,) = warnings_of(caplog)
    assert line.startswith(f"report.tensorboard ({tmp_path}/tensorboard) has failed (")


class StandIn(types.ModuleType):
    """Like wandb, it tells by its run's `step` which is the first that it lacks."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []
        self.first_step = 0

    def init(
        self,
        project: str | None = None,
        id: str | None = None,
        name: str | None = None,
        resume: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> Any:
        arguments = {"project": project, "id": id, "name": name, "resume": resume}
        self.calls.append(("init", arguments | {"config": config}))
        return types.SimpleNamespace(step=self.first_step)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))

    class Html:
        def __init__(self, data: str) -> None:
            self.data = data


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def follow(run: RunInfo) -> Follower:
    run = replace(run, run_id="0123456789abcdef", settings=SETTINGS)
    return Follower(run, Tracker(run, "wandb"))


def test_a_run_is_told_of_with_its_name_and_settings(
    tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's `init` takes no `dir`, so it is not given one."""
    sink = follow(make_run(tmp_path / "my project" / "run"))
    sink.log(1, {"train/loss": 2.5, "lr": 0.1})
    sink.log_text(1, "sample", "<To be>\n")
    sink.close()
    init, log, text, finish = wandb.calls
    assert init[1] == {
        "project": "my-project",
        "name": "run-01234567",
        "id": "0123456789abcdef",
        "resume": "allow",
        "config": SETTINGS,
    }
    assert log == ("log", 1, {"train/loss": 2.5, "lr": 0.1, "generation": 1})
    assert text[1] == 1 and text[2]["sample"].data == "<pre>&lt;To be&gt;\n</pre>"
    assert finish == ("finish",)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    follow(make_run(tmp_path)).close()
    assert wandb.calls[4][1]["project"] == "mine"


@pytest.mark.parametrize(("known", "sent"), [(8, [8, 9, 10, 11, 12]), (12, [12])])
def test_a_restart_sends_what_the_tracker_lacks_and_no_step_twice(
    known: int, sent: list[int], tmp_path: Path, wandb: StandIn
) -> None:
    """It may have lost some, and have got some past the step from which the run goes on."""
    wandb.first_step = known
    sink = follow(resumed(tmp_path, 10))
    for step in (11, 12):
        sink.log(step, {"train/loss": float(step)})
    sink.close()
    logged = [call[1:] for call in wandb.calls if call[0] == "log"]
    assert logged == [(step, {"train/loss": float(step), "generation": 2}) for step in sent]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_an_absent_package_is_one_line_that_names_it(
    package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if f".{package}." in f".{name}."]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    run = make_run(tmp_path)
    Follower(run, TensorBoard(run) if package == "tensorboard" else Tracker(run, package)).close()
    (line,) = warnings_of(caplog)
    assert f"needs the package {package}, which is not installed: the run goes on without it" in line
