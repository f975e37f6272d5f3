"""Jobs whose disk is full, or fails."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, changed_program, command, final_hash, snapshot_steps
from support.jobs import read_history, read_metric

# Writing a file of a snapshot of step 25 or 30 fails as long as the file `marker` exists.
FAIL = """
import errno, os
def fail(name, path, size):
    if os.path.exists({marker!r}) and name.startswith(("step_00000025.", "step_00000030.")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
events.subscribe("file_write", fail)
"""


def failing_program(folder: Path, marker: Path) -> Path:
    marker.touch()
    return changed_program(folder, FAIL.format(marker=str(marker)))


@pytest.mark.slow
def test_a_last_snapshot_that_cannot_be_written_is_one_sentence_and_no_restart(
    start: Start, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """After the disk is repaired, the same command ends with the undisturbed bits."""
    run_dir, marker = tmp_path / "run", tmp_path / "full"
    program = failing_program(tmp_path, marker)
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__workers": 2}
    words = command(program=program, **settings)
    job = start(words)
    assert job.wait() == 1
    errors = job.err()
    assert not [line for line in errors.splitlines() if line.startswith("  File") and "/mingpt/" in line]
    assert errors.count("error: ") == 1
    assert (
        f"error: the snapshot of step 30 cannot be written to {run_dir}/snapshots (No space left on "
        "device) and the run "
        "stands at step 20 there: make room or repair it, and start the same command again, which goes on "
        "from there\n"
    ) in errors
    history = read_history(run_dir)
    assert (history["status"], len(history["generations"])) == ("failed", 1)
    assert snapshot_steps(run_dir) == [5, 10, 15, 20]
    marker.unlink()
    assert start(words).wait() == 0
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert read_metric(run_dir) == read_metric(undisturbed)


@pytest.mark.weekly
@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", ">&- 2>&- <&-"])
def test_output_that_goes_nowhere_ends_no_run(
    redirection: str, start: Start, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    words = shlex.join(command(run_dir=tmp_path / "run", data__path=text, trainer__workers=2))
    assert start(["bash", "-c", f"{words} {redirection}"]).wait() == 0
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
    assert "finished at step 30" in (tmp_path / "run" / "log.txt").read_text()
