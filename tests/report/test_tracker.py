"""With a stand-in that has wandb's interface and notes its calls; tests/jobs runs trackio itself."""

import dataclasses
import json
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import make_run

from mingpt.report.tracker import TrackerFollower, project_name

SETTINGS = {"seed": 1, "data": {"path": "s3://***@bucket/text"}}


class StandIn(types.ModuleType):
    """Like wandb, it tells by its run's `step` which is the first that it lacks."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []
        self.first_step: int | None = 0
        self.is_chatty = False

    def init(
        self,
        project: str | None = None,
        id: str | None = None,
        name: str | None = None,
        resume: str | None = None,
        config: dict[str, Any] | None = None,
        dir: str | None = None,
    ) -> Any:
        arguments = {"project": project, "id": id, "name": name, "resume": resume, "dir": dir}
        self.calls.append(("init", arguments | {"config": config}))
        return types.SimpleNamespace(step=self.first_step)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if self.is_chatty:
            print(f"\x1b[1mstep {step}\x1b[0m")
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))

    class Html:
        def __init__(self, data: str) -> None:
            self.data = data

    def logged(self) -> list[tuple[int, float]]:
        """(step, training loss)"""
        logs = [call for call in self.calls if call[0] == "log"]
        return [(step, values["train/loss"]) for _, step, values in logs if "train/loss" in values]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "wandb"]


def start(run_dir: Path, package: str = "wandb", step: int = 0, generation: int = 1) -> TrackerFollower:
    run = dataclasses.replace(
        make_run(run_dir, is_fresh=generation == 1),
        run_id="0123456789abcdef",
        settings=SETTINGS,
        starts=[(0, "")] * generation,
    )
    sink = TrackerFollower(run, package)
    sink.rewind(step)
    return sink


def write_metrics(run_dir: Path, steps: range) -> None:
    records = [{"step": step, "train/loss": float(step)} for step in steps]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_is_told_of_with_its_name_and_settings(tmp_path: Path, wandb: StandIn) -> None:
    run_dir = tmp_path / "my project" / "run"
    sink = start(run_dir)
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
        "dir": str(run_dir),
    }
    assert log == ("log", 1, {"train/loss": 2.5, "lr": 0.1, "generation": 1})
    assert text[1] == 1 and text[2]["sample"].data == "<pre>&lt;To be&gt;\n</pre>"
    assert finish == ("finish",)


def test_a_module_without_a_type_for_text_gets_none(
    tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(StandIn, "Html")
    sink = start(tmp_path)
    sink.log_text(1, "sample", "To be")
    sink.close()
    assert [call[0] for call in wandb.calls] == ["init", "finish"]


def test_the_project_may_be_named_by_the_packages_own_variable(
    tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start(tmp_path).close()
    assert wandb.calls[0][1]["project"] == "mine"


def test_a_folder_without_a_name_is_the_project_mingpt() -> None:
    assert project_name(Path("/run")) == "mingpt"


@pytest.mark.parametrize(("known", "sent"), [(8, [8, 9, 10, 11, 12]), (12, [12]), (None, [11, 12])])
def test_a_restart_sends_what_the_tracker_lacks_and_no_step_twice(
    known: int | None, sent: list[int], tmp_path: Path, wandb: StandIn
) -> None:
    """It may have lost some, and have got some past the step from which the run goes on."""
    wandb.first_step = known
    write_metrics(tmp_path, range(11))
    sink = start(tmp_path, step=10, generation=2)
    for step in (10, 11, 12):  # the record of the start may come once more
        sink.log(step, {"train/loss": float(step)})
    sink.close()
    assert wandb.logged() == [(step, float(step)) for step in sent]
    assert {call[2]["generation"] for call in wandb.calls if call[0] == "log"} == {2}


def test_turned_on_in_the_middle_of_a_run_it_gets_the_whole_of_it(tmp_path: Path, wandb: StandIn) -> None:
    write_metrics(tmp_path, range(11))
    start(tmp_path, step=10, generation=2).close()
    assert [step for step, _ in wandb.logged()] == list(range(11))


def test_what_it_prints_goes_to_the_log_and_not_to_stdout(
    tmp_path: Path,
    wandb: StandIn,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    wandb.is_chatty = True
    before = sys.stdout
    sink = start(tmp_path)
    for step in range(100):
        sink.log(step, {"train/loss": 1.0})
    print("of the main thread")
    sink.close()
    assert sys.stdout is before
    assert capsys.readouterr().out == "of the main thread\n"
    lines = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert lines == [f"report.tracker=wandb: step {step}" for step in range(20)]


def test_an_absent_package_is_one_line_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = start(tmp_path)
    sink.log(1, {"train/loss": 1.0})
    sink.close()
    sentence = "needs the package wandb, which is not installed: the run goes on without it"
    assert [record.getMessage() for record in caplog.records] == [f"report.tracker=wandb {sentence}"]
