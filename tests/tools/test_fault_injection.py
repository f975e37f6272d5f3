"""Who dies of the kills that verify plans."""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingpt.base import events
from mingpt.tools.fault_injection import FaultInjector, Kill, marker


@pytest.fixture
def victims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that a fault injector has sent to this process, which survives them."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(events, "subscribe", lambda name, callback: None)
    return sent


def save_dies(folder: Path, rank: int, workers: int, planned: int, is_sharded: bool) -> bool:
    """Whether this rank is killed while it writes a file, by a plan that names rank `planned`."""
    kill = Kill("save", 4, planned, workers, "fsdp")
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"kills": [asdict(kill)], "sabotage": ""}))
    injector = FaultInjector(folder)
    launch: Any = SimpleNamespace(rank=rank, world_size=workers)
    injector.on_worker_start(launch)
    injector.on_run_start(SimpleNamespace(step=4), SimpleNamespace(updates_are_sharded=is_sharded))
    injector.on_file_progress("step_00000004.safetensors", 9, 10)
    return marker(folder, 0).exists()


@pytest.mark.parametrize(
    ("workers", "planned", "is_sharded", "victim"),
    [
        (1, 5, True, 0),
        (2, 0, True, 0),
        (2, 1, True, 1),
        (2, 1, False, 0),
        (4, 1, True, 1),
        (4, 6, True, 0),
        (4, 7, True, 1),
        (4, 7, False, 0),
    ],
)
def test_a_save_kills_one_of_the_workers_that_write_its_two_files(
    workers: int, planned: int, is_sharded: bool, victim: int, tmp_path: Path, victims: list[int]
) -> None:
    """Rank 0 alone, unless the updates are sharded."""
    died = [
        rank for rank in range(workers) if save_dies(tmp_path / str(rank), rank, workers, planned, is_sharded)
    ]
    assert died == [victim]
    assert victims == [signal.SIGKILL]
