import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.plot import LossPlot, the_figure


def test_a_picture_that_cannot_be_drawn_ends_no_run_and_the_next_one_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plot = LossPlot(make_run(tmp_path))
    the_figure.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    plot.draw()
    plot.draw()
    monkeypatch.undo()
    plot.close()
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert "loss.png cannot be written (ModuleNotFoundError: " in caplog.text
