"""Jobs that a tracker follows, one that blocks, and jobs that nobody follows."""

import time
from pathlib import Path
from typing import Any

from conftest import Start, changed_program, command, final_hash, reached

from mingpt.tools.jobs import read_history

# A package with wandb's interface whose `log` never returns.
STAND_IN = """
import threading
def init(**arguments):
    pass
def log(values, step):
    threading.Event().wait()
def finish():
    pass
"""


def tracker_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("report.tracker")]


def test_a_tracker_that_blocks_is_one_line(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The bits stay as they are, and the run ends in time, in the same way."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(STAND_IN)
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 1}
    job = start(command(report__tracker="wandb", **settings), PYTHONPATH=str(tmp_path))
    job.wait_until(reached(tmp_path / "run", 30))
    began = time.monotonic()
    assert job.wait() == 0, job.err()
    assert time.monotonic() - began < 15
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
    sentence = "did not end within 5 s and is given up: it may lack the last values"
    assert tracker_lines(job.err()) == [f"report.tracker=wandb {sentence}"]
    assert "Traceback" not in job.err() and job.out() == ""
    assert read_history(tmp_path / "run")["status"] == "finished"


NAME_IMPORTS = """
def on_run_end(state):
    wanted = {"tensorboard", "wandb", "trackio"}
    found = sorted({name.split(".")[0] for name in sys.modules} & wanted)
    sys.stderr.write(f"imported: {found}\\n")
events.subscribe("run_end", on_run_end)
"""


def test_a_run_that_nobody_follows_imports_none_of_the_packages(
    start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(tmp_path, NAME_IMPORTS)
    settings: dict[str, Any] = {"trainer__max_steps": 2, "trainer__workers": 1}
    job = start(command(program=program, run_dir=tmp_path / "run", data__path=text, **settings))
    assert job.wait() == 0 and "imported: []\n" in job.err()
