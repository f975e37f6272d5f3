import os
import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.plot import LossPlot


def test_an_evaluation_draws_the_picture_and_the_end_of_a_run_what_has_come_since(tmp_path: Path) -> None:
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
    assert (tmp_path / "loss.png").read_bytes() != before and os.listdir(tmp_path) == ["loss.png"]
    assert plot.lines["train/loss"].get_xydata().tolist() == [[1, 4.0], [3, 1.5]]


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plot = LossPlot(make_run(tmp_path))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
        for _ in range(2):
            plot.start_drawing().result()
    plot.close()
    first, second = caplog.messages
    assert "loss.png cannot be written (ModuleNotFoundError: " in first
    assert second == f"{tmp_path / 'loss.png'} is written again"
