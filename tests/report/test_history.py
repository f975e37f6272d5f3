import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.runs import make_run

from mingpt.distributed import GenerationEnd
from mingpt.report import load_history, read_job_start
from mingpt.report.history import RunHistory, mark_ended

RUN_ID = "abc123"
GENERATION = '{"end": "running", "from_step": 0, "to_step": 4, "restart": false, "began": 1.0, "seen": 2.0}'
WHOLE = f'{{"id": "{RUN_ID}", "generations": [{GENERATION}], %s}}'  # a run.json with one field more
FAILED = "failed (ValueError: twice two)"
REPEATED = (
    f"3 generations failed one after the other at step 5 (worker 0 {FAILED}): a restart would repeat it"
)


def open_history(run_dir: Path) -> RunHistory:
    return RunHistory(run_dir, RUN_ID, {"torch": "2"})


def begin(
    history: RunHistory,
    step: int = 0,
    restart: bool = False,
    end: GenerationEnd | None = None,
    hosts: str = "a",
) -> str | None:
    """Start a generation, with a worker on each host."""
    facts: dict[str, Any] = {"workers": len(hosts), "is_restart": restart, "previous": end, "hosts": [*hosts]}
    return history.start_generation(make_run(step=step, **facts))


def read(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "run.json").read_text()))


def test_a_run_without_interruption_is_one_generation(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    assert begin(history, hosts="ab") is None
    assert (read(tmp_path)["status"], read(tmp_path)["id"]) == ("running", RUN_ID)
    history.note_step(10, 0.25, {"evaluation_s": 1.5})
    history.end("finished", 30, "finished", {"evaluation_s": 3.5})
    content = read(tmp_path)
    assert (content["status"], content["seconds_lost"], content["goodput"]) == ("finished", 0.0, 1.0)
    phases = {"start_s": pytest.approx(0, abs=0.2), "evaluation_s": 3.5, "snapshot_wait_s": 0.0}
    told = {"workers": 2, "from_step": 0, "to_step": 30, "exact": True, "end": "finished", "phases": phases}
    assert [entry | told for entry in content["generations"]] == content["generations"]
    assert {"torch", "python"} <= content["versions"].keys()
    assert history.summary() == "1 generation, 0 steps done twice, 0.0 s lost, goodput 100.0%"


LOST = {"why": "left without a peer", "step": 14}
MEMORY = ": the kernel killed a process for lack of memory"


@pytest.mark.parametrize(
    ("hosts", "reasons", "after", "kills", "end"),
    [
        ("abc", [LOST, None, None], "ab", 2, "workers 1, 2 vanished"),
        ("a", [LOST, None], "a", 3, f"worker 1 vanished{MEMORY}"),
        ("a", [LOST, None], "b", 3, "worker 1 vanished"),  # counts of two hosts cannot be compared
        ("ab", None, "bc", 2, "a vanished"),  # the store died with its node
        ("ab", None, "ab", 2, "all workers vanished"),
    ],
)
def test_the_end_of_a_killed_generation_is_told_by_the_next(
    hosts: str, reasons: list[Any] | None, after: str, kills: int, end: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the reasons of its workers, or by the hosts. Two recorded steps are done again, of 0.5 s each."""
    monkeypatch.setattr("mingpt.report.history.count_oom_kills", iter([2, kills, kills]).__next__)
    history = open_history(tmp_path)
    begin(history, hosts=hosts)
    history.note_step(12, 0.5)
    history.record({}, {})  # otherwise the file is written a moment later
    step, previous = (14, GenerationEnd(reasons)) if reasons else (12, None)
    said = begin(open_history(tmp_path), 10, True, previous, after)
    workers = f"{len(after)} worker{'s' if len(after) > 1 else ''}"
    assert said == f"{end} at step {step}; resumed from 10 with {workers}"
    content = read(tmp_path)
    found = [(entry["from_step"], entry["to_step"], entry["end"]) for entry in content["generations"]]
    assert found == [(0, step, end), (10, 10, "running")]
    assert content["generations"][0]["exact"] == bool(reasons)
    assert content["steps_lost"] == step - 10 and content["seconds_lost"] >= 2 * 0.5


def test_what_a_job_began_with_is_on_record_until_another_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job may begin as a restart: the store tells of a generation that left no record.

    In a restart the newest snapshot on disk, here that of step 20, may be gone with its disk. The time until
    a restart is lost, here 100 s.
    """
    now, found = 1000.0, []
    monkeypatch.setattr("mingpt.report.history.time", Mock(time=lambda: now, monotonic=lambda: now))
    for job, step, is_restart in (
        ("one", 10, False),
        ("one", 15, True),
        ("two", 15, True),
        ("two", 5, False),
    ):
        history = open_history(tmp_path)
        start = make_run(tmp_path, step=step, job=job, is_restart=is_restart, process_began=now - 3)
        history.start_generation(start)
        content = read(tmp_path)
        facts = content["job_began"], content["durable_step"], content["seconds_lost"]
        found.append((*facts, read_job_start(content)))
        history.note_durable(20)
        history.record({}, {})  # otherwise the file is written a moment later
        now += 100
    assert found == [(997, 0, 0, 10), (997, 20, 100, 10), (1197, 20, 200, 10), (1197, 0, 200, 5)]


def test_no_step_waits_for_a_slow_disk_and_the_latest_content_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, go_on, written = open_history(tmp_path), threading.Event(), list[str]()

    def slow_write(path: Path, content: str, **_: object) -> None:
        assert go_on.wait(30)
        written.append(content)

    begin(history)
    monkeypatch.setattr("mingpt.report.writing.write_atomic", slow_write)
    for step in range(1, 100):
        history.note_step(step, 0.5)
    go_on.set()
    history.record({}, {})
    assert len(written) <= 3 and json.loads(written[-1])["generations"][0]["to_step"] == 99


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([4, 4, 4], REPEATED),
        ([4, 4], None),
        ([4, 4, 5], None),
        ([5, 4, 4], None),
        ([None] * 4, None),  # without a report
    ],
)
def test_three_failures_at_the_same_step_end_the_job_unless_a_user_starts_it_again(
    steps: list[int | None], said: str | None, tmp_path: Path
) -> None:
    history, previous = open_history(tmp_path), None
    for number, step in enumerate([*steps, 0]):
        begin(history, 0, number > 0, previous)
        previous = GenerationEnd([None if step is None else {"why": FAILED, "step": step}])
    assert history.repeated_failure() == said
    begin(history, 0, False, previous)
    assert history.repeated_failure() is None


def test_three_nodes_that_join_at_the_same_step_are_no_failures(tmp_path: Path) -> None:
    """The workers are stopped in order each time."""
    said = []
    for hosts in ("a", "ab", "abc", "abcd"):
        history = open_history(tmp_path)
        said.append(begin(history, 12, len(hosts) > 1, hosts=hosts))
        assert history.repeated_failure() is None
        history.end("stopped", 12, "stopped by SIGTERM")
    assert said[1] == "stopped by SIGTERM at step 12; resumed from 12 with 2 workers"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "3",
        '{"id": "../elsewhere", "generations": []}',
        WHOLE % '"seconds_lost": 1e400',
        WHOLE % '"changes": [{"step": 1, "settings": ["seed"]}]',
    ],
    ids=range(5),
)
def test_a_damaged_file_is_set_aside(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if another one has been."""
    for text in (content, content + " "):
        (tmp_path / "run.json").write_text(text)
        assert load_history(tmp_path) is None
        begin(open_history(tmp_path))
    assert (tmp_path / "damaged-run.json").read_text() == content
    assert [path.read_text() for path in tmp_path.glob("damaged-run-*.json")] == [content + " "]
    assert "it is set aside as damaged-run.json" in caplog.text and len(read(tmp_path)["generations"]) == 1


def test_a_job_that_ends_before_its_training_notes_that_only_in_a_history_that_runs(tmp_path: Path) -> None:
    mark_ended(tmp_path, "failed")
    assert list(tmp_path.iterdir()) == []
    history = open_history(tmp_path)
    begin(history)
    for status in ("failed", "finished"):
        mark_ended(tmp_path, status)
        assert read(tmp_path)["status"] == "failed"
