import os
import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.history import GenerationStart, RunHistory
from mingpt.report.plot import LossPlot, figure_of


def test_an_evaluation_draws_the_picture_and_the_end_of_a_run_what_has_come_since(tmp_path: Path) -> None:
    RunHistory(tmp_path, "abc", {}).start_generation(GenerationStart("abc", 0, 1, False))
    plot = LossPlot(make_run(tmp_path, restarts=[1, 2], floor=1.3))
    plot.replay(1, {"train/loss": 4.0})
    plot.replay(1, {"val/loss": 5.0})
    plot.log(2, {"val/loss": 1.6})
    assert plot.drawing
    plot.drawing.result()
    before = (tmp_path / "loss.png").read_bytes()
    assert before.startswith(b"\x89PNG\r\n\x1a\n")
    plot.log(3, {"train/loss": 1.5})
    plot.close()
    assert (tmp_path / "loss.png").read_bytes() != before
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "run.json", "timeline.png"]
    (axes,) = figure_of("loss.png").axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 4.0], [3, 1.5]]
    assert axes.get_title() == f"{tmp_path.name}: gpt2, 2 layers x 32, 1,234 parameters"


def test_the_late_losses_fill_the_picture_and_the_first_ones_leave_it_at_its_top(tmp_path: Path) -> None:
    plot = LossPlot(make_run(tmp_path, restarts=[30, 70], floor=1.3))
    for step in range(101):
        plot.replay(step, {"train/loss": 10.0 if step < 10 else 2.0 - step / 200})
    plot.replay(50, {"val/loss": float("nan")})
    plot.close()
    (axes,) = figure_of("loss.png").axes
    assert axes.get_ylim() == pytest.approx((1.268, 1.982), abs=0.005)


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    RunHistory(tmp_path, "abc", {}).start_generation(GenerationStart("abc", 0, 1, False))
    plot = LossPlot(make_run(tmp_path))
    figure_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
        for _ in range(2):
            plot.start_drawing().result()
    plot.close()
    names = ("loss.png", "timeline.png")
    for name, failed, worked in zip(names, caplog.messages[:2], caplog.messages[2:], strict=True):
        assert f"{name} cannot be written (ModuleNotFoundError: " in failed
        assert worked == f"{tmp_path / name} is written again"
