"""timeline.png: the places of bars and marks, and their names."""

import json
from pathlib import Path
from typing import Any

import pytest

from mingpt.report.history import Generation
from mingpt.report.plot import figure_of, lay_out, main, shorten

PHASES = {"start_s": 5.0, "evaluation_s": 10.0, "snapshot_wait_s": 3.0}


def generation(began: float, first: int, last: int, **more: Any) -> dict[str, Any]:
    """The entry of a generation of 100 s, with 0.5 s per step."""
    times = {"began": began, "seen": began + 100, "seconds": 100.0, "step_s": 0.5, "phases": PHASES}
    steps = {"from_step": first, "to_step": last, "restart": True}
    return times | steps | {"end": "worker 1 vanished", "hosts": ["a"]} | more


def test_a_bar_tells_its_phases_and_the_night_between_two_jobs_is_cut_out() -> None:
    day_s = 86400.0
    entries = [
        generation(1000, 0, 160, restart=False),
        generation(1107, 140, 300, seen=0.0),  # the clock was set back
        generation(day_s, 300, 460, restart=False, phases={}, seconds=0.0),
    ]
    edges, cuts = lay_out([Generation.model_validate(entry) for entry in entries])
    assert edges[0] == [0, 5, 5, 92, 102, 105, 105]
    assert edges[1] == [107, 112, 122, 199, 209, 212, 212], "20 of its steps were done twice"
    ((left, width, pause_s),) = cuts
    assert (left, pause_s) == (212, day_s) and 0 < width < 10
    assert edges[2] == [212 + width] * 6 + [312 + width], "its run.json does not tell phases apart"


@pytest.mark.parametrize(
    ("end", "word"),
    [
        ("worker 1 failed (ValueError: twice two)", "worker 1 failed"),
        ("workers 0, 1, 2, 3, 4 did not answer for 60 s: a.py:1 in f", "5 workers did not answer for 60 s"),
        ("the workers lost a peer (Connection closed)", "workers lost a peer"),
        ("the workers were told to stop by SIGTERM", "told to stop by SIGTERM"),
        ("failed: the snapshot of step 7 cannot be written", "failed"),
    ],
)
def test_an_end_is_told_in_a_few_words(end: str, word: str) -> None:
    assert shorten(end) == word


def test_hundreds_of_generations_have_a_lane_for_each_host_and_as_many_words_as_there_is_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = (["b"], ["a$b$", "b"])
    entries = [generation(110.0 * n, 0, 9, hosts=lanes[n % 2]) for n in range(1, 500)]
    content = {"id": "abc", "status": "running", "goodput": 0.5, "generations": entries}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'timeline.png'}\n"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    figure = figure_of("timeline.png")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a$b$", "b"]
    assert 10 < len(axes.texts) < 30
    assert figure.get_suptitle().startswith(f"{tmp_path.name}: goodput 50.0%, 499 generations")
    assert {"node came", "node went"} <= set(axes.get_legend_handles_labels()[1])
