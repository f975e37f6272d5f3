"""loss.png and timeline.png, by what is drawn on their figures."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import make_run

from mingpt.report.history import Generation, RunHistory
from mingpt.report.plot import Curves, LossPlot, draw_curves, figure_of, main, phase_seconds, to_png

PNG = b"\x89PNG\r\n\x1a\n"


def write_records(run_dir: Path, *records: dict[str, Any]) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def test_an_evaluation_draws_the_losses_and_the_end_of_a_run_what_has_come_since(tmp_path: Path) -> None:
    RunHistory(tmp_path, "abc", {}).start_generation(make_run(tmp_path))
    plot = LossPlot(make_run(tmp_path, floor=1.3, from_steps=[0, 1, 2]))
    losses = [{"step": step, "train/loss": 10.0 if step < 10 else 2.0 - step / 200} for step in range(100)]
    evaluations = [(0, 4.0), (20, float("nan")), (50, 1.5), (99, 1.75)]
    write_records(tmp_path, *losses, *({"step": step, "val/loss": loss} for step, loss in evaluations))
    plot.log(99, {"val/loss": 1.75})
    assert plot.drawing
    plot.drawing.result()
    before = (tmp_path / "loss.png").read_bytes()
    write_records(tmp_path, {"step": 100, "train/loss": 1.5})
    plot.close()
    assert before.startswith(PNG) and (tmp_path / "loss.png").read_bytes() != before
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    (axes,) = figure_of("loss.png").axes
    smoothed, lowest, evaluated, raw, _ = (line.get_xydata().tolist() for line in axes.lines)
    assert (raw[50], raw[-1]) == ([50, 1.75], [100, 1.5]) and smoothed[50] == [50, pytest.approx(1.75)]
    assert smoothed[9][1] == pytest.approx(np.mean([raw[step][1] for step in range(6, 13)]))
    assert evaluated == [[0, 4.0], [50, 1.5], [99, 1.75]] and lowest == [[50, 1.5]]
    assert axes.get_title() == f"{tmp_path.name}: gpt2, 2 layers x 32, 35,744 parameters"
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert labels[0] == "val/loss: lowest 1.5000 at step 50" and "restarts: 2" in labels
    # The late losses fill the picture, and the first ones leave it at its top.
    assert axes.get_ylim() == pytest.approx((1.267, 1.984), abs=0.005)


def test_several_runs_are_drawn_in_a_colour_each_and_named(tmp_path: Path) -> None:
    curve, empty = np.array([[0.0, 1.0, 2.0], [3.0, 2.0, 2.5]]), np.empty((2, 0))
    runs = {"_a$x$": Curves(curve, curve), "b": Curves(curve + 1, empty), "c": Curves(empty, empty)}
    assert to_png("curves.png", draw_curves, runs).startswith(PNG)
    (axes,) = figure_of("curves.png").axes
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert labels == ["_a$x$: lowest 2.0000 at step 1", "b", "c"]
    drawn = [line.get_color() for line in axes.lines if line.get_xydata().size]
    assert drawn == ["C0", "C0", "C0", "C1"]


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    RunHistory(tmp_path, "abc", {}).start_generation(make_run(tmp_path))
    plot = LossPlot(make_run(tmp_path))
    figure_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
        for _ in range(2):
            plot.draw()
    plot.close()
    names = ("loss.png", "timeline.png")
    for name, failed, worked in zip(names, caplog.messages[:2], caplog.messages[2:], strict=True):
        assert f"{name} cannot be written (ModuleNotFoundError: " in failed
        assert worked == f"{tmp_path / name} is written again"


def generation(began: float, first: int, last: int, **more: Any) -> dict[str, Any]:
    """The entry of a generation of 100 s, with 0.5 s per step."""
    phases = {"start_s": 5.0, "evaluation_s": 10.0, "snapshot_wait_s": 3.0}
    times = {"began": began, "seen": began + 100, "seconds": 100.0, "step_s": 0.5, "phases": phases}
    steps = {"from_step": first, "to_step": last, "restart": True}
    return times | steps | {"end": "worker 1 vanished", "hosts": ["a"]} | more


def test_a_death_costs_the_steps_done_again_and_the_time_until_the_next_start() -> None:
    killed, restarted, next_day = (
        Generation.model_validate(generation(began, first, last, restart=restart))
        for began, first, last, restart in (
            (1000, 0, 160, False),
            (1107, 140, 300, True),
            (90_000, 300, 460, False),
        )
    )
    # 20 steps of 0.5 s were done again, and of the 7 s until the restart, 5 s were its own start.
    assert phase_seconds(killed, restarted) == [5, 77, 10, 3, 12]
    assert phase_seconds(restarted, next_day) == [5, 87, 10, 3, 0], "no time between two jobs is lost"
    assert phase_seconds(next_day, None) == [5, 87, 10, 3, 0]


def test_of_many_generations_the_last_have_a_bar_each_with_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [generation(110.0 * n, 9 * n, 9 * n + 9, workers=3) for n in range(500)]
    entries[-2]["end"] = "worker 1 failed ($x^$)"
    content = {"id": "abc", "status": "running", "goodput": 0.5, "generations": entries}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'timeline.png'}\n"
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    figure = figure_of("timeline.png")
    assert figure.get_suptitle().startswith(f"{tmp_path.name}: goodput 50.0%, 500 generations")
    words = [text.get_text() for text in figure.axes[0].texts]
    lines = [text for text in words if text.startswith("generation")]
    assert len(lines) == 20 and lines[-2] == (
        "generation 499: 0:01:50, 3 workers, steps 4482 to 4491: worker 1 failed ($x^$)"
    )
    assert "not in the order of time" in figure.axes[0].get_xlabel()
    assert words.count("9 %") == 19, "the share of evaluations, but for the last, which lost nothing"
