"""loss.png, by what is drawn on its figure."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.golden import Golden
from support.runs import make_run

from mingpt.report.history import RunHistory
from mingpt.report.plot import Curves, LossPlot, draw_curves, the_figure, to_png

PNG = b"\x89PNG\r\n\x1a\n"


def test_an_evaluation_draws_the_losses_and_the_end_of_a_run_what_has_come_since(
    tmp_path: Path, golden: Golden
) -> None:
    history, plot = RunHistory(tmp_path, "abc", {}), LossPlot(make_run(tmp_path, floor=1.3))
    for step in range(3):
        history.start_generation(make_run(tmp_path, step=step, is_restart=True))
    losses = [{"step": step, "train/loss": 10.0 if step < 10 else 2.0 - step / 200} for step in range(100)]
    evaluations = [(0, 4.0), (20, float("nan")), (50, 1.5), (99, 1.75)]
    records: list[dict[str, float]] = [
        *losses,
        *({"step": step, "val/loss": loss} for step, loss in evaluations),
    ]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
        file.flush()
        plot.log(99, {"val/loss": 1.75})
        assert plot.drawing and plot.drawing.result() is None
        before = (tmp_path / "loss.png").read_bytes()
        file.write('{"step": 100, "train/loss": 1.5}\n')
    plot.close()
    assert before.startswith(PNG) and (tmp_path / "loss.png").read_bytes() != before
    (axes,) = the_figure().axes
    smoothed, lowest, evaluated, raw, _ = (line.get_xydata().tolist() for line in axes.lines)
    assert (raw[50], raw[-1]) == ([50, 1.75], [100, 1.5]) and smoothed[50] == [50, pytest.approx(1.75)]
    assert smoothed[9][1] == pytest.approx(np.mean([raw[step][1] for step in range(6, 13)]))
    assert evaluated == [[0, 4.0], [50, 1.5], [99, 1.75]] and lowest == [[50, 1.5]]
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    golden("\n".join([axes.get_title().replace(tmp_path.name, "RUN"), *labels]))
    # The late losses fill the picture, and the first ones leave it at its top.
    assert axes.get_ylim() == pytest.approx((1.267, 1.984), abs=0.005)


def test_several_runs_are_drawn_in_a_colour_each_and_named() -> None:
    curve, empty = np.array([[0.0, 1.0, 2.0], [3.0, 2.0, 2.5]]), np.empty((2, 0))
    runs = {"a": Curves(curve, curve), "b": Curves(curve + 1, empty), "c": Curves(empty, empty)}
    assert to_png(draw_curves, runs).startswith(PNG)
    (axes,) = the_figure().axes
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert labels == ["a: lowest 2.0000 at step 1", "b", "c"]
    drawn = [line.get_color() for line in axes.lines if line.get_xydata().size]
    assert drawn == ["C0", "C0", "C0", "C1"]


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plot = LossPlot(make_run(tmp_path))
    the_figure.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    plot.draw()
    plot.draw()
    monkeypatch.undo()
    plot.close()
    failed, worked = caplog.messages
    assert "loss.png cannot be written (ModuleNotFoundError: " in failed
    assert worked == f"{tmp_path / 'loss.png'} is written again"
