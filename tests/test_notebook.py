"""The notebook for Colab and Kaggle: its cells run on CPUs, in two sessions on different machines."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.jobs import ROOT, SMALL, free_port, read_history, read_metric
from support.pages import NEEDED, finish, start

NOTEBOOK = ROOT / "examples" / "colab_kaggle.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
STEPS = 2  # of each session
TRAINING = next(number for number, cell in enumerate(CELLS) if "!torchrun" in "".join(cell["source"]))


def shell(line: str) -> None:
    finish(start(line, Path.cwd(), free_port()))


def run_session(number: int, last_cell: int | None, text: Path, **places: Path) -> None:
    """Run the cells up to `last_cell` in one namespace, as IPython does; `places` replace the notebook's."""
    small = SMALL | {"trainer.dtype": "float32", "trainer.eval_every": STEPS, "snapshot.keep_best": True}
    small |= {"data.path": text, "trainer.max_steps": number * STEPS, "snapshot.resume": "changed"}
    names: dict[str, Any] = {}
    for cell in CELLS[:last_cell]:
        code = re.sub(r"^( *)!(.*)$", r"\1shell(f'''\2''')", "".join(cell["source"]), flags=re.MULTILINE)
        exec(code, names)
        if cell is CELLS[0]:
            settings = " ".join(f"{name}={value}" for name, value in small.items())
            names |= {
                "shell": shell,
                "SETTINGS": settings,
                **{key: str(path) for key, path in places.items()},
            }


@pytest.mark.slow
def test_the_cells_go_on_where_an_earlier_session_stopped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session keeps the run in another folder, as on Colab; the second reads it, as on Kaggle."""
    monkeypatch.chdir(ROOT)
    git = f"git --git-dir={tmp_path}/git -c core.bare=false -c user.name=a -c user.email=a --work-tree=."
    bundle, drive, one, two = (tmp_path / name for name in ("bundle", "drive", "one", "two"))
    for words in ("init -q", f"add {' '.join(NEEDED)} requirements.txt", "commit -qm all"):
        subprocess.run([*git.split(), *words.split()], check=True)
    subprocess.run([*git.split(), "bundle", "create", "-q", bundle, "--all"], check=True)
    places = {"SOURCE": bundle, "CODE": one / "code", "RUN": one / "run", "KEPT": drive, "EARLIER": drive}
    run_session(1, TRAINING + 1, text, **places)
    run = two / "run"
    run_session(2, None, text, **places | {"CODE": two / "code", "RUN": run, "KEPT": run})
    history = read_history(run)
    assert [(one["from_step"], one["to_step"]) for one in history["generations"]] == [(0, 2), (2, 4)]
    assert history["status"] == "finished" and list(read_metric(run)) == [1, 2, 3, 4]
    assert (run / "snapshots/step_00000004.json").exists() and (run / "best/model.safetensors").exists()
