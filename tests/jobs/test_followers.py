"""A job whose TensorBoard and tracker are not used."""

from pathlib import Path
from typing import Any

from conftest import Start, changed_program, command

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
