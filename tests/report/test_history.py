import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.runs import make_run

from mingpt.distributed import GenerationEnd
from mingpt.report import load_history, mark_ended, read_job_start
from mingpt.report.history import MAX_REPEATS, RunHistory

RUN_ID = "abc123"
GENERATION = '{"end": "running", "from_step": 0, "to_step": 4, "restart": false, "began": 1.0, "seen": 2.0}'
WHOLE = f'{{"id": "{RUN_ID}", "generations": [{GENERATION}], %s}}'  # a run.json with one field more
FAILURE = {"why": "failed (ValueError: twice two)"}


def open_history(run_dir: Path) -> RunHistory:
    return RunHistory(run_dir, RUN_ID, {"torch": "2"})


def begin(
    history: RunHistory,
    step: int = 0,
    is_restart: bool = False,
    previous: GenerationEnd | None = None,
    hosts: Sequence[str] = (),
) -> str | None:
    """Start a generation, with a worker on each host, or one."""
    workers = len(hosts) or 1
    return history.start_generation(
        make_run(step=step, workers=workers, is_restart=is_restart, previous=previous, hosts=[*hosts])
    )


def read(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "run.json").read_text()))


def test_a_run_without_interruption_is_one_generation(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    assert begin(history, hosts=("a", "b")) is None
    assert (read(tmp_path)["status"], read(tmp_path)["id"]) == ("running", RUN_ID)
    history.note_step(10, 0.25, {"evaluation_s": 1.5})
    history.end("finished", 30, "finished", {"evaluation_s": 3.5})
    content = read(tmp_path)
    (generation,) = content["generations"]
    assert (content["status"], content["seconds_lost"], content["goodput"]) == ("finished", 0.0, 1.0)
    start_s = pytest.approx(0, abs=0.2)
    assert generation == generation | {
        "workers": 2,
        "from_step": 0,
        "to_step": 30,
        "exact": True,
        "end": "finished",
        "phases": {"start_s": start_s, "evaluation_s": 3.5, "snapshot_wait_s": 0.0},
    }
    assert {"torch", "python"} <= content["versions"].keys()
    assert history.summary() == "1 generation, 0 steps done twice, 0.0 s lost, goodput 100.0%"


def test_a_generation_that_was_killed_is_closed_by_the_next(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    begin(history, hosts=("a", "b", "c"))
    history.note_step(12, 0.5)
    history.record({}, {})  # otherwise the file is written a moment later
    end = GenerationEnd([{"why": "left without a peer", "step": 14}, None, None])
    sentence = "workers 1, 2 vanished at step 14; resumed from 10 with 2 workers"
    assert begin(open_history(tmp_path), 10, True, end, ("a", "b")) == sentence
    content = read(tmp_path)
    first, second = content["generations"]
    assert (first["end"], first["to_step"], first["exact"]) == ("workers 1, 2 vanished", 14, True)
    assert (second["from_step"], second["workers"], second["end"]) == (10, 2, "running")
    assert content["steps_lost"] == 4
    assert content["seconds_lost"] >= 2 * 0.5, "two recorded steps are done again"


@pytest.mark.parametrize(("hosts", "kills", "said"), [("a", 3, True), ("a", 2, False), ("b", 3, False)])
def test_a_worker_that_vanished_when_memory_ran_out_is_told_so(
    hosts: str, kills: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of two hosts cannot be compared."""
    end = GenerationEnd([{"why": "lost a peer", "step": 4}, None])
    for count, host in ((2, "a"), (kills, hosts)):
        monkeypatch.setattr("mingpt.report.history.count_oom_kills", lambda count=count: count)
        begin(open_history(tmp_path), 4, True, end, (host,))
    why = ": the kernel killed a process for lack of memory" if said else ""
    assert read(tmp_path)["generations"][0]["end"] == f"worker 1 vanished{why}"


def test_a_job_begins_with_its_first_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may begin as a restart: the store tells of a generation that left no record."""
    now, found = 1000.0, list[float]()
    monkeypatch.setattr("mingpt.report.history.time", Mock(time=lambda: now, monotonic=lambda: now))
    for job, is_restart in (("one", False), ("one", True), ("two", True), ("two", False)):
        history = open_history(tmp_path)
        facts: dict[str, Any] = {"job": job, "is_restart": is_restart, "process_began": now - 3}
        history.start_generation(make_run(tmp_path, **facts))
        found.append(read(tmp_path)["job_began"])
        now += 100
    assert found == [997, 997, 1197, 1197]


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
    ("is_stopped", "hosts", "end", "said"),
    [
        (True, "abc", "stopped by SIGTERM", "stopped by SIGTERM at step 12; resumed from 12 with 3 workers"),
        (False, "bc", "a vanished", "a vanished at step 12; resumed from 12 with 2 workers"),
        (
            False,
            "ab",
            "all workers vanished",
            "all workers vanished at step 12; resumed from 12 with 2 workers",
        ),
    ],
)
def test_an_end_of_which_no_reasons_are_known_is_told_by_the_hosts(
    is_stopped: bool, hosts: str, end: str, said: str, tmp_path: Path
) -> None:
    """A node that joins has the others stopped by SIGTERM. The store may die with its node."""
    history = open_history(tmp_path)
    begin(history, hosts="ab")
    history.note_step(12, 0.5)
    history.record({}, {})
    if is_stopped:
        history.end("stopped", 12, "stopped by SIGTERM")
    assert begin(open_history(tmp_path), 12, True, hosts=hosts) == said
    assert read(tmp_path)["generations"][0]["end"] == end


def fail_repeatedly(run_dir: Path, steps: Sequence[int | None]) -> RunHistory:
    """Let generations fail after these steps (None: without a report), then begin one more."""
    history = open_history(run_dir)
    previous = None
    for number, step in enumerate([*steps, 0]):
        begin(history, 0, number > 0, previous)
        previous = GenerationEnd([None if step is None else FAILURE | {"step": step}])
    return history


def test_three_failures_at_the_same_step_end_the_job_unless_a_user_starts_it_again(tmp_path: Path) -> None:
    history = fail_repeatedly(tmp_path, [4] * MAX_REPEATS)
    assert history.repeated_failure() == (
        "3 generations failed one after the other at step 5 "
        "(worker 0 failed (ValueError: twice two)): a restart would repeat it"
    )
    begin(history, 0, False, GenerationEnd([FAILURE | {"step": 4}]))
    assert history.repeated_failure() is None


@pytest.mark.parametrize("steps", [[4, 4], [4, 4, 5], [5, 4, 4], [None] * 4])
def test_fewer_failures_or_other_steps_do_not_end_the_job(steps: list[int | None], tmp_path: Path) -> None:
    assert fail_repeatedly(tmp_path, steps).repeated_failure() is None


def test_three_nodes_that_join_at_the_same_step_are_no_failures(tmp_path: Path) -> None:
    for hosts in ("a", "ab", "abc", "abcd"):
        history = open_history(tmp_path)
        begin(history, 12, len(hosts) > 1, hosts=hosts)
        assert history.repeated_failure() is None
        history.end("stopped", 12, "stopped by SIGTERM")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "3",
        '{"id": "abc123", "generations": 3}',
        '{"id": "abc123", "generations": []}',
        '{"id": "../elsewhere", "generations": []}',
        '{"id":' + "[" * 100_000,
        WHOLE % '"seconds_lost": "x"',
        WHOLE % '"seconds_lost": 1e400',
        WHOLE % '"changes": [3]',
        WHOLE % '"changes": [{"step": 1, "settings": ["seed"]}]',
        WHOLE % '"job_began": null',
    ],
    ids=range(11),
)
def test_a_damaged_file_is_set_aside(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in (content, content + " "):
        (tmp_path / "run.json").write_text(text)
        assert load_history(tmp_path) is None
        begin(open_history(tmp_path))
    assert (tmp_path / "damaged-run.json").read_text() == content
    assert [path.read_text() for path in tmp_path.glob("damaged-run-*.json")] == [content + " "]
    assert "it is set aside as damaged-run.json" in caplog.text
    assert len(read(tmp_path)["generations"]) == 1


def test_a_job_that_ends_before_its_last_generation_has_begun_is_noted(tmp_path: Path) -> None:
    mark_ended(tmp_path, "stopped")  # there is no run.json to write to
    assert not (tmp_path / "run.json").exists()
    history = open_history(tmp_path)
    begin(history)
    mark_ended(tmp_path, "stopped")
    assert (read(tmp_path)["status"], read(tmp_path)["generations"][-1]["end"]) == ("stopped", "running")
    history.end("finished", 3, "finished")
    mark_ended(tmp_path, "stopped")
    assert read(tmp_path)["status"] == "finished"


def test_the_start_of_the_job_and_the_newest_snapshot_on_disk_are_on_record_until_another_job_begins(
    tmp_path: Path,
) -> None:
    history = open_history(tmp_path)
    begin(history, 10)
    history.note_durable(20)
    history.record({}, {})
    begin(open_history(tmp_path), 15, is_restart=True)
    content = read(tmp_path)
    assert content["durable_step"] == 20, "its disk may be gone, and a restart is in memory"
    assert read_job_start(content) == 10
    begin(open_history(tmp_path), 5)
    assert (read(tmp_path)["durable_step"], read_job_start(read(tmp_path))) == (0, 5)


class Slow(dict[str, Any]):
    """A dictionary during whose encoding another thread calls `work`."""

    def __init__(self, work: Any) -> None:
        super().__init__(a=1)
        self.thread = threading.Thread(target=work)

    def items(self) -> Any:
        if not self.thread.ident:
            self.thread.start()
            self.thread.join(0.3)
        return super().items()


def test_a_thread_may_record_while_another_thread_records(tmp_path: Path) -> None:
    """A thread that ends the process records a failure while the main thread trains."""
    history = open_history(tmp_path)
    begin(history)
    slow = Slow(lambda: history.note_skipped(3))
    history.content["slow"] = slow
    history.note_missing(1, 2)
    slow.thread.join()
    assert (read(tmp_path)["updates_skipped"], read(tmp_path)["generations"][0]["metrics_missing"]) == (
        3,
        [1, 2],
    )
