import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Job, command, final_hash, reached, wait_until
from test_snapshot import manifest

from mingpt.memory import Memory

Start = Callable[..., Job]


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((100,), float(step)), "model.b": torch.tensor(step)}


def take(memory: Memory, step: int, after: int = 0) -> None:
    memory.take(manifest(step) | {"after": after}, state(step))
    if memory.thread:
        memory.thread.join()


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(str(tmp_path), "abc", tmp_path, node=0)


def again(memory: Memory, run: str = "abc", node: int = 0) -> Memory:
    return Memory(str(memory.root.parent), run, memory.root.parent, node)


def newest(memory: Memory, newer_than: int = -1, beside: int | None = None) -> int | None:
    found = memory.newest(newer_than, beside)
    assert found is None or all(torch.equal(tensor, state(found.manifest["step"])[name]) for name, tensor in found.tensors().items())
    return found.manifest["step"] if found else None


def test_the_newest_two_states_are_kept_and_a_later_generation_goes_on_with_them(memory: Memory) -> None:
    assert newest(memory) is None
    for step in (5, 10, 15):
        take(memory, step)
    assert newest(memory) == 15 and memory.own.steps() == [15, 10]
    later = again(memory)
    take(later, 20)
    assert later.own.steps() == [20, 15], "what the earlier generation left stays until there are two newer ones"
    take(later, 25)
    assert later.own.steps() == [25, 20] and len(later.own.names()) == 4


def test_what_is_older_than_a_durable_one_or_follows_a_later_one_does_not_count(memory: Memory) -> None:
    take(memory, 25, after=20)
    assert newest(memory, newer_than=20, beside=20) == 25
    assert newest(memory, newer_than=25) is None
    assert newest(memory, newer_than=0, beside=10) is None, "somebody has deleted the snapshot of step 20"
    assert newest(memory, newer_than=0) == 25


def test_what_a_job_did_not_start_from_does_not_come_back_at_a_restart(memory: Memory) -> None:
    for step in (25, 30):
        take(memory, step, after=20)
    take(again(memory, node=1), 30, after=20)
    later = again(memory)
    later.drop_newer(25)
    assert newest(later) == 25
    later.drop_newer(-1)
    assert newest(later) is None


def test_another_run_and_a_copy_of_the_run_folder_see_nothing(memory: Memory, tmp_path: Path) -> None:
    take(memory, 5)
    assert newest(again(memory, run="abd")) is None
    assert newest(Memory(str(tmp_path), "abc", tmp_path / "copy", node=0)) is None
    assert newest(again(memory, node=1)) == 5, "but another node number of this run does"


def test_one_that_is_being_written_over_is_none_and_the_other_stands(memory: Memory) -> None:
    for step in (5, 10):
        take(memory, step)
    memory.begin()  # as if killed in the middle of the copy
    memory.slots[memory.turn].buffer[200:300] = 7
    assert newest(memory) == 10
    later = again(memory)
    take(later, 15)
    assert newest(later) == 15


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_flipped_bit_is_noticed(memory: Memory, kind: str) -> None:
    for step in (5, 10):
        take(memory, step)
    path = Path(memory.own.path(f"step_00000010.{kind}"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert newest(memory) == 5


def test_a_state_of_another_size_takes_the_place_of_the_old_one(memory: Memory) -> None:
    take(memory, 5)
    later = again(memory)
    for step in (10, 15):
        later.take(manifest(step) | {"after": 0}, {"model.c": torch.zeros(7)})
        assert later.thread
        later.thread.join()
    assert later.own.steps() == [15, 10] and [len(tensor) for tensor in later.own.read(15).tensors().values()] == [7]


@pytest.mark.parametrize("why", ["absent", "too small"])
def test_where_there_is_no_room_it_says_so_once_and_is_off(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    memory = Memory(str(tmp_path / "absent" if why == "absent" else tmp_path), "abc", tmp_path, node=0)
    if why == "too small":
        real = os.posix_fallocate

        def fallocate(handle: int, offset: int, size: int) -> None:
            if "slot-1" in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(28, "No space left on device")
            real(handle, offset, size)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
    for step in (5, 10):
        take(memory, step)
    assert len(caplog.records) == 1 and "no snapshots in memory" in caplog.text
    assert newest(memory) is None and not Path(memory.own.root).exists()


def test_a_killed_worker_comes_back_from_memory_and_an_orderly_end_leaves_none(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The durable snapshots lie far apart; then the whole job is killed and started again, with another number of workers."""
    shm = tmp_path / "shm"
    shm.mkdir()
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "data__path": text,
        "snapshot__every": 1000,
        "snapshot__memory_every": 2,
        "snapshot__memory_path": shm,
    }
    job = start(command(workers=2, restarts=3, **settings))
    wait_until(reached(tmp_path / "run", 9), job)
    os.kill(job.workers()[0], signal.SIGKILL)
    wait_until(lambda: len(json.loads((tmp_path / "run" / "run.json").read_text())["generations"]) > 1, job)
    wait_until(reached(tmp_path / "run", 14), job)
    job.kill()
    job.process.communicate()
    assert len(list(shm.iterdir())) == 1
    (tmp_path / "run" / "STOP").touch()  # heard before the first step or after it: what only memory held must become durable
    stopped = start(command(workers=2, **settings)).finish()
    assert stopped.code == 0 and list(shm.iterdir()) == [], stopped.err
    (at,) = [int(path.stem[5:]) for path in (tmp_path / "run" / "snapshots").glob("step_*.json")]
    assert at >= 10
    done = start(command(workers=3, **settings)).finish()
    assert done.code == 0, done.err
    begins = [entry["from_step"] for entry in json.loads((tmp_path / "run" / "run.json").read_text())["generations"]]
    assert begins[0] == 0 and begins[1] >= 6 and begins[2] >= 10 and all(step % 2 == 0 for step in begins[:3]) and begins[3] == at
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
    assert list(shm.iterdir()) == []
