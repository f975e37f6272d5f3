"""`python -m mingpt timeline`, by what is drawn on its figure."""

import json
from pathlib import Path

import pytest

from mingpt.report.plot import the_figure
from mingpt.tools.timeline import main


def test_each_of_the_last_generations_has_a_bar_of_what_its_time_went_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 generations of a job, each of 100 s and 0.5 s per step, and one of a job on the next day."""
    phases = {"start_s": 5.0, "evaluation_s": 10.0, "snapshot_wait_s": 3.0}
    generations = [
        {"began": began, "seen": began + 100, "seconds": 100.0, "step_s": 0.5, "phases": phases, "workers": 3}
        | {
            "from_step": 140 * n,
            "to_step": 140 * n + 160,
            "restart": n > 0,
            "end": f"worker {n} failed ($x^$)",
        }
        for n, began in enumerate(range(1000, 1000 + 20 * 107, 107))
    ]
    next_day = {"began": 90_000, "seen": 90_100, "from_step": 2820, "restart": False, "end": "running"}
    generations.append(generations[-1] | next_day)
    content = {"id": "abc", "status": "running", "goodput": 0.5, "generations": generations}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'timeline.png'}\n"
    (axes,) = the_figure().axes
    bars = {bars.get_label().split(":")[0]: list(bars.datavalues) for bars in axes.containers}
    # 20 steps of 0.5 s were done again, and of the 7 s until a restart, 5 s were its own start.
    assert bars == {
        "start": [5] * 20,
        "training": [77] * 18 + [87] * 2,
        "evaluation": [10] * 20,
        "waiting for snapshots": [3] * 20,
        "lost": [12] * 18 + [0] * 2,  # no time between two jobs is lost
    }
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0] == "steps 140 to 300, 3 workers:\nworker 1 failed ($x^$)"
    assert the_figure().get_suptitle().startswith(f"{tmp_path.name}: goodput 50.0%, 21 generations")
