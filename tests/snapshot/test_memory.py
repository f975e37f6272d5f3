import dataclasses
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.snapshots import make_manifest

from mingpt.snapshot import MemorySaver, MemorySnapshots, Process, Sharding, this_process
from mingpt.snapshot.memory import LEFT_TO_AGENT, remove_after_end


def make_state(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((100,), float(step)), "model.b": torch.tensor(step)}


def make_saver(
    path: Path, run_id: str, run_dir: Path, node_rank: int, owner: Process | None = None
) -> MemorySaver:
    """The saver of the first worker of a node, which holds the whole state."""
    return MemorySaver(MemorySnapshots(str(path), run_id, run_dir, node_rank, owner), Sharding())


def save(memory: MemorySaver, step: int, after: int = 0) -> None:
    """Save a step and wait for the end; `after` is the newest step on disk at that time."""
    memory.save(make_manifest(step) | {"after": after}, make_state(step))
    if memory.thread:
        memory.thread.join()


@pytest.fixture
def memory(tmp_path: Path) -> MemorySaver:
    return make_saver(tmp_path, "abc", tmp_path, node_rank=0)


def reopen(memory: MemorySaver, run_id: str = "abc", node_rank: int = 0) -> MemorySaver:
    """Open the memory as a later generation does, on the same node or on another one."""
    agent = this_process() if node_rank == 0 else this_process(os.getppid())
    folder = memory.snapshots.root.parent
    return make_saver(folder, run_id, folder, node_rank, agent)


def newest_step(memory: MemorySaver, newer_than: int = -1, saved_after: int | None = None) -> int | None:
    """The newest step that is found; also checks the values of all that are found."""
    for store, found in memory.snapshots.find(newer_than, saved_after):
        store.verify(found)
        step = int(found.manifest["step"])
        expected = make_state(step)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.tensors().items())
        return step
    return None


def test_where_there_is_no_such_folder_it_says_so_once_and_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = make_saver(tmp_path / "absent", "abc", tmp_path, node_rank=0)
    for step in (5, 10):
        save(memory, step)
    (line,) = caplog.messages
    assert line.startswith(f"no snapshots in memory: {tmp_path}/absent cannot be used (No such file")
    assert f", on {platform.node()}); after a kill" in line


def test_the_newest_two_states_are_kept_and_a_later_generation_goes_on_with_them(memory: MemorySaver) -> None:
    assert newest_step(memory) is None
    for step in (5, 10, 15):
        save(memory, step)
    assert newest_step(memory) == 15
    assert memory.own.store.steps() == [15, 10]
    later = reopen(memory)
    save(later, 20)
    assert later.own.store.steps() == [20, 15], (
        "the earlier generation's stays until there are two newer ones"
    )
    assert len(later.own.store.names()) == 4


def test_one_that_is_older_than_a_durable_one_or_was_saved_after_a_later_one_does_not_count(
    memory: MemorySaver,
) -> None:
    save(memory, 25, after=20)
    assert newest_step(memory, newer_than=20, saved_after=20) == 25
    assert newest_step(memory, newer_than=25) is None
    assert newest_step(memory, newer_than=0, saved_after=10) is None, "a user has deleted that of step 20"
    assert newest_step(memory, newer_than=0) == 25


def test_what_a_job_did_not_start_from_does_not_come_back_at_a_restart(memory: MemorySaver) -> None:
    for step in (25, 30):
        save(memory, step, after=20)
    save(reopen(memory, node_rank=1), 30, after=20)
    later = reopen(memory)
    later.snapshots.remove_newer(25)
    assert newest_step(later) == 25
    later.snapshots.remove_newer(-1)
    assert newest_step(later) is None


def test_another_run_and_a_copy_of_the_run_folder_see_nothing(memory: MemorySaver, tmp_path: Path) -> None:
    save(memory, 5)
    assert newest_step(reopen(memory, run_id="abd")) is None
    assert newest_step(make_saver(tmp_path, "abc", tmp_path / "copy", node_rank=0)) is None
    assert newest_step(reopen(memory, node_rank=1)) == 5, "another node of this run does"


def test_one_that_is_being_overwritten_is_none_and_the_other_is_valid(memory: MemorySaver) -> None:
    for step in (5, 10):
        save(memory, step)
    memory.own.begin()  # as if killed in the middle of the copy
    memory.own.buffer.buffer[200:300] = 7
    assert newest_step(memory) == 10


def test_an_orderly_end_removes_the_snapshots_of_all_nodes(memory: MemorySaver, tmp_path: Path) -> None:
    save(memory, 5)
    save(reopen(memory, node_rank=1), 5)
    assert memory.snapshots.root.exists()
    memory.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_also_on_disk_is_removed_with_its_agent_unless_a_later_generation_has_begun(
    tmp_path: Path,
) -> None:
    """A later generation may have saved to memory what is not yet on disk."""
    neighbour = this_process(os.getppid())
    on_disk, used_again, other = [
        make_saver(tmp_path, name, tmp_path, 0, neighbour if name == "other" else None)
        for name in ("on disk", "used again", "other")
    ]
    for memory in (on_disk, used_again, other):
        save(memory, 5)
        memory.leave_to_agent()
    save(reopen(used_again, run_id="used again"), 10)
    remove_after_end(tmp_path, LEFT_TO_AGENT)
    left = {path.name.split("-")[1] for path in tmp_path.glob("mingpt-*")}
    assert left == {"used again", "other"}


@pytest.fixture
def gone() -> Process:
    """A process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = this_process(child.pid)
    child.kill()
    child.wait()
    return process


def make_owned(folder: Path, owner: Process, run_id: str, node_rank: int = 0) -> MemorySaver:
    """Snapshots of step 5 in memory, of a job whose agent is `owner`."""
    memory = make_saver(folder, run_id, folder, node_rank, owner)
    save(memory, 5)
    return memory


def make_old(root: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    for path in (*root.rglob("*"), root):
        os.utime(path, (then, then))


def test_what_a_run_left_is_removed_after_a_day_unless_a_process_of_its_job_lives(
    tmp_path: Path, gone: Process, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    alive, elsewhere = this_process(), dataclasses.replace(gone, machine="another pid namespace")
    left = {
        name: make_owned(tmp_path, owner, name).snapshots.root
        for name, owner in {"old": gone, "recent": gone, "living": alive, "unknown": elsewhere}.items()
    }
    for name, root in left.items():
        make_old(root, hours=23.9 if name == "recent" else 24.1)
    (tmp_path / "mingpt-link").symlink_to(left["old"])
    own = make_owned(tmp_path, alive, "own")
    make_old(own.snapshots.root, hours=100)
    own.snapshots.remove_leftovers()
    assert sorted(name for name, root in left.items() if root.exists()) == ["living", "recent", "unknown"]
    assert own.snapshots.root.exists()
    assert len(caplog.records) == 1 and str(left["old"]) in caplog.text


def test_a_runs_own_outdated_folder_is_removed_once_a_newer_snapshot_is_durable(
    tmp_path: Path, gone: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """The folders are of a dead agent, of this one under another node rank, and of a living neighbour."""
    caplog.set_level(logging.WARNING)
    own = make_owned(tmp_path, this_process(), "run", node_rank=0)
    neighbour = this_process(os.getppid())
    others = [
        make_owned(tmp_path, owner, "run", node_rank=rank)
        for rank, owner in ((1, gone), (2, this_process()), (3, neighbour))
    ]
    own.remove_outdated(4)
    assert all(other.own.folder.exists() for other in others), "theirs may be the newest"
    own.remove_outdated(5)
    assert [other.own.folder.exists() for other in others] == [False, False, True]
    assert newest_step(own) == 5
    assert len(caplog.records) == 2
