import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mingpt.distributed import GenerationEnd
from mingpt.distributed.rendezvous import MAX_REPEATS
from mingpt.report import GenerationStart, load_history, mark_ended, read_job_start
from mingpt.report.history import RunHistory, plural

RUN_ID = "abc123"
FAILURE = {"why": "failed (ValueError: twice two)"}


def open_history(run_dir: Path) -> RunHistory:
    return RunHistory(run_dir, RUN_ID, {"torch": "2"})


def begin(
    history: RunHistory,
    workers: int,
    step: int,
    previous: GenerationEnd | None,
    is_restart: bool,
    changes: list[str],
    hosts: tuple[str, ...] = (),
) -> str | None:
    """Start a generation."""
    start = GenerationStart(
        RUN_ID, step, workers, is_restart, previous=previous, changes=changes, hosts=[*hosts]
    )
    return history.start_generation(start)


def read(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return content


def test_a_run_without_interruption_is_one_generation(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    assert begin(history, 2, 0, None, False, []) is None
    assert (read(tmp_path)["status"], read(tmp_path)["id"]) == ("running", RUN_ID)
    history.note_step(10, 0.25, {"evaluation_s": 1.5})
    history.end("finished", 30, "finished", {"evaluation_s": 3.5})
    content = read(tmp_path)
    (generation,) = content["generations"]
    assert (content["id"], content["status"], content["steps_lost"]) == (RUN_ID, "finished", 0)
    assert (content["seconds_lost"], content["goodput"]) == (0.0, 1.0)
    assert generation["phases"] == {"start_s": 0.0, "evaluation_s": 3.5, "snapshot_wait_s": 0.0}
    assert (generation["workers"], generation["from_step"], generation["to_step"]) == (2, 0, 30)
    assert (generation["exact"], generation["end"]) == (True, "finished")
    assert {"torch", "python"} <= content["versions"].keys()
    assert history.summary() == "1 generation, 0 steps done twice, 0.0 s lost, goodput 100.0%"


def test_a_generation_that_was_killed_is_closed_by_the_next(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    begin(history, 3, 0, None, False, [])
    history.note_step(12, 0.5)
    history.write()  # otherwise the file is written a moment later
    end = GenerationEnd(3, {0: {"why": "left without a peer", "step": 14}})
    later = open_history(tmp_path)
    sentence = begin(later, 2, 10, end, True, [])
    assert sentence == "workers 1, 2 vanished at step 14; resumed from 10 with 2 workers"
    content = read(tmp_path)
    first, second = content["generations"]
    assert (first["end"], first["to_step"], first["exact"]) == ("workers 1, 2 vanished", 14, True)
    assert (second["from_step"], second["workers"], second["end"]) == (10, 2, "running")
    assert content["steps_lost"] == 4
    assert content["seconds_lost"] >= 2 * 0.5, "two recorded steps are done again"


def test_steps_that_an_orderly_end_has_saved_and_a_user_has_deleted_are_done_twice(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    begin(history, 1, 0, None, False, [])
    history.note_step(30, 0.5)
    history.end("finished", 34, "finished")
    later = open_history(tmp_path)
    assert begin(later, 1, 4, None, False, []) is None
    assert later.summary().startswith("2 generations, 30 steps done twice, 15.0 s lost")


def test_no_step_waits_for_a_slow_disk_and_the_latest_content_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, go_on, written = open_history(tmp_path), threading.Event(), list[str]()

    def slow_write(path: Path, content: str, **_: object) -> None:
        assert go_on.wait(30)
        written.append(content)

    begin(history, 1, 0, None, False, [])
    monkeypatch.setattr("mingpt.report.files.write_atomic", slow_write)
    for step in range(1, 100):
        history.note_step(step, 0.5)
    go_on.set()
    history.write()
    assert len(written) <= 3 and json.loads(written[-1])["generations"][0]["to_step"] == 99


@pytest.mark.parametrize("set_back_in_generation", [1, 2])
def test_a_clock_that_is_set_back_loses_no_time(
    set_back_in_generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"time": 10_000.0, "monotonic": 0.0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])
    for number in (1, 2):
        history = open_history(tmp_path)
        begin(history, 1, 8 * (number - 1), None, number > 1, [])
        clock["monotonic"] += 100
        clock["time"] += 100 - 3600 * (number == set_back_in_generation)
        history.note_step(10 * number, 1.0)
        history.write()
    content = read(tmp_path)
    assert [entry["seconds"] for entry in content["generations"]] == [100, 100]
    assert (content["seconds_lost"], content["goodput"]) == (2.0, 0.99)


@pytest.mark.parametrize(
    ("hosts", "end"),
    [(("a", "b", "c"), "c joined"), (("a",), "stopped by SIGTERM"), (("a", "b"), "stopped by SIGTERM")],
)
def test_a_generation_that_ends_for_a_node_says_so(hosts: tuple[str, ...], end: str, tmp_path: Path) -> None:
    history = open_history(tmp_path)
    begin(history, 2, 0, None, False, [], hosts=("a", "b"))
    history.end("stopped", 12, "stopped by SIGTERM")
    sentence = begin(open_history(tmp_path), len(hosts), 12, None, True, [], hosts=hosts)
    said = f"{end} at step 12; resumed from 12 with {plural(len(hosts), 'worker')}"
    assert sentence == (None if end == "stopped by SIGTERM" else said)
    assert read(tmp_path)["generations"][0]["end"] == end


def fail_repeatedly(run_dir: Path, steps: Sequence[int | None]) -> RunHistory:
    """Let generations fail after these steps (None: without a report), then begin one more."""
    history = open_history(run_dir)
    previous = None
    for number, step in enumerate([*steps, 0]):
        begin(history, 1, 0, previous, number > 0, [])
        previous = GenerationEnd(1, {} if step is None else {0: FAILURE | {"step": step}})
    return history


def test_three_failures_at_the_same_step_end_the_job_unless_a_user_starts_it_again(tmp_path: Path) -> None:
    history = fail_repeatedly(tmp_path, [4] * MAX_REPEATS)
    assert history.repeated_failure() == (
        "3 generations failed one after the other at step 5 "
        "(worker 0 failed (ValueError: twice two)): a restart would repeat it"
    )
    begin(history, 1, 0, GenerationEnd(1, {0: FAILURE | {"step": 4}}), False, [])
    assert history.repeated_failure() is None


@pytest.mark.parametrize("steps", [[4, 4], [4, 4, 5], [5, 4, 4], [None] * 4])
def test_fewer_failures_or_other_steps_do_not_end_the_job(steps: list[int | None], tmp_path: Path) -> None:
    assert fail_repeatedly(tmp_path, steps).repeated_failure() is None


def test_three_nodes_that_join_at_the_same_step_are_no_failures(tmp_path: Path) -> None:
    for hosts in ("a", "ab", "abc", "abcd"):
        history = open_history(tmp_path)
        begin(history, len(hosts), 12, None, len(hosts) > 1, [], hosts=tuple(hosts))
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
    ],
    ids=range(6),
)
def test_a_damaged_file_is_set_aside(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.json").write_text(content)
    assert load_history(tmp_path) is None
    begin(open_history(tmp_path), 1, 0, None, False, [])
    assert (tmp_path / "damaged-run.json").read_text() == content
    assert "it is set aside as damaged-run.json" in caplog.text
    assert len(read(tmp_path)["generations"]) == 1


def test_a_job_that_ends_before_its_last_generation_has_begun_is_noted(tmp_path: Path) -> None:
    mark_ended(tmp_path, "failed", "failed: why")  # there is no run.json to write to
    assert not (tmp_path / "run.json").exists()
    history = open_history(tmp_path)
    begin(history, 2, 0, None, False, [])
    mark_ended(tmp_path, "stopped")
    assert read(tmp_path)["status"] == "stopped" and read(tmp_path)["generations"][-1]["end"] == "running"
    history.write()
    mark_ended(tmp_path, "failed", "failed: why")
    assert read(tmp_path)["status"] == "failed" and read(tmp_path)["generations"][-1]["end"] == "failed: why"
    history.end("finished", 30, "finished")
    mark_ended(tmp_path, "stopped", "failed: why")
    assert read(tmp_path)["status"] == "finished" and read(tmp_path)["generations"][-1]["end"] == "finished"


def test_a_generation_whose_store_is_gone_is_told_by_the_hosts_that_are_missing(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    begin(history, 3, 0, None, False, [], hosts=("node1", "node2", "node3"))
    history.note_step(12, 0.5)
    history.write()
    sentence = begin(open_history(tmp_path), 2, 10, None, True, [], hosts=("node2", "node3"))
    assert sentence == "node1 vanished at step 12; resumed from 10 with 2 workers"
    first, second = read(tmp_path)["generations"]
    assert (first["to_step"], first["exact"], second["hosts"]) == (12, False, ["node2", "node3"])


def test_the_start_of_the_job_and_the_newest_snapshot_on_disk_are_on_record_until_another_job_begins(
    tmp_path: Path,
) -> None:
    history = open_history(tmp_path)
    assert read_job_start(history.content) is None
    begin(history, 1, 10, None, False, [])
    assert read(tmp_path)["durable_step"] == 0
    history.note_durable(20)
    history.write()
    assert read(tmp_path)["durable_step"] == 20
    assert load_history(tmp_path, "another") is None
    begin(open_history(tmp_path), 1, 15, None, True, [])
    assert read(tmp_path)["durable_step"] == 20, "its disk may be gone, and a restart is in memory"
    assert read_job_start(read(tmp_path)) == 10
    begin(open_history(tmp_path), 1, 5, None, False, [])
    assert (read(tmp_path)["durable_step"], read_job_start(read(tmp_path))) == (0, 5)
