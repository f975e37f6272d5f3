import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.plot import LossPlot

PNG = b"\x89PNG\r\n\x1a\n"


def replay(plot: LossPlot, steps: int) -> None:
    for step in range(1, steps + 1):
        plot.replay(step, {"train/loss": 4.0 / step})
        plot.replay(step, {"val/loss": 5.0 / step})


def test_an_evaluation_draws_the_picture(tmp_path: Path) -> None:
    plot = LossPlot(make_run(tmp_path, restarts=[1, 2], floor=1.3))
    replay(plot, 3)
    plot.log(3, {"val/loss": 1.6})
    plot.wait()
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png"]


def test_nothing_but_an_evaluation_draws(tmp_path: Path) -> None:
    plot = LossPlot(make_run(tmp_path))
    plot.log(3, {"train/loss": 1.6, "a metric of another kind": 3.0})
    plot.on_step(3)
    plot.rewind(2)
    plot.flush()
    plot.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_draws_what_has_come_since(tmp_path: Path) -> None:
    plot = LossPlot(make_run(tmp_path))
    replay(plot, 2)
    plot.log(2, {"val/loss": 1.6})
    plot.wait()
    before = (tmp_path / "loss.png").read_bytes()
    for step in range(3, 31):
        plot.log(step, {"train/loss": 4.0 / step})
    plot.close()
    assert (tmp_path / "loss.png").read_bytes() != before


def test_a_run_without_records_has_an_empty_picture(tmp_path: Path) -> None:
    LossPlot(make_run(tmp_path)).close()
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_without_matplotlib_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    LossPlot(make_run(tmp_path)).close()
    assert caplog.messages == ["no loss.png: matplotlib is not installed"]
    assert list(tmp_path.iterdir()) == []
