"""Jobs whose disk is full, or fails."""

import errno
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, changed_program, command, final_hash, snapshot_steps

from mingpt.tools.jobs import read_history, read_metric, torchrun

# Writing a file of a snapshot of one of `steps` fails as long as the file `marker` is there.
FAIL = """
import os
def fail(name, path, size):
    if os.path.exists({marker!r}) and name.startswith({names!r}):
        raise OSError({code}, os.strerror({code}))
events.subscribe("file_write", fail)
"""


def failing_program(folder: Path, marker: Path, steps: tuple[int, ...], code: int) -> Path:
    marker.touch()
    names = tuple(f"step_{step:08d}." for step in steps)
    return changed_program(folder, FAIL.format(marker=str(marker), names=names, code=code))


@pytest.mark.parametrize(
    ("code", "reason", "launcher", "kept"),
    [
        (28, "No space left on device", [sys.executable], [20]),  # the others made room, which did not help
        pytest.param(
            5, "Input/output error", torchrun(2, restarts=3), [5, 10, 15, 20], marks=pytest.mark.slow
        ),
    ],
    ids=["full", "broken"],
)
def test_a_last_snapshot_that_cannot_be_written_is_one_sentence_and_no_restart(
    code: int,
    reason: str,
    launcher: list[str],
    kept: list[int],
    start: Start,
    text: Path,
    tmp_path: Path,
    undisturbed: Path,
) -> None:
    """After the disk is repaired, the same command ends with the undisturbed bits."""
    run_dir, marker = tmp_path / "run", tmp_path / "full"
    program = failing_program(tmp_path, marker, (25, 30), code)
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__workers": 2}
    words = command(launcher=launcher, program=program, **settings)
    job = start(words)
    assert job.wait() == 1
    errors = job.err()
    assert not [line for line in errors.splitlines() if line.startswith("  File") and "/mingpt/" in line]
    assert errors.count("error: ") == 1
    assert (
        f"error: the snapshot of step 30 cannot be written to {run_dir}/snapshots ({reason}) and the run "
        "stands at step 20 there: make room or repair it, and start the same command again, which goes on "
        "from there\n"
    ) in errors
    history = read_history(run_dir)
    assert (history["status"], len(history["generations"])) == ("failed", 1)
    assert snapshot_steps(run_dir) == kept
    marker.unlink()
    assert start(words).wait() == 0
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert read_metric(run_dir) == read_metric(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", ">/dev/full 2>/dev/full", ">&- 2>&- <&-"])
def test_output_that_goes_nowhere_ends_no_run(
    redirection: str, start: Start, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    words = shlex.join(command(run_dir=tmp_path / "run", data__path=text, trainer__workers=2))
    assert start(["bash", "-c", f"{words} {redirection}"]).wait() == 0
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
    assert "finished at step 30" in (tmp_path / "run" / "log.txt").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a size, or changes its size."""
    folder = tmp_path / "disk"

    def resize(size: str) -> Path:
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        options = f"size={size}" if is_new else f"remount,size={size}"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a tmpfs cannot be mounted here")
        return folder

    yield resize
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "code"), [("500k", 1), ("1m", 0), ("2m", 0)])
def test_a_run_folder_on_a_small_disk(
    size: str,
    code: int,
    start: Start,
    text: Path,
    small_disk: Callable[[str], Path],
    undisturbed: Path,
) -> None:
    """No traceback; the right end; after making room the same command ends with the undisturbed bits."""
    run_dir = small_disk(size) / "run"
    words = command(run_dir=run_dir, data__path=text, trainer__workers=1)
    job = start(words)
    assert job.wait() == code
    assert "Traceback" not in job.err()
    small_disk("20m")
    assert start(words).wait() == 0
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert read_metric(run_dir) == read_metric(undisturbed)
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_sentence_that_cannot_be_printed_either_burns_no_restarts(
    start: Start, text: Path, tmp_path: Path
) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "full"
    program = failing_program(tmp_path, marker, (25, 30), errno.ENOSPC)
    own: dict[str, Any] = {"trainer__workers": 2, "trainer__max_restarts": 3}
    words = command(program=program, run_dir=run_dir, data__path=text, **own)
    assert start(["bash", "-c", f"exec {shlex.join(words)} 2>/dev/full"]).wait() == 1
    history = read_history(run_dir)
    assert (history["status"], len(history["generations"])) == ("failed", 1)
