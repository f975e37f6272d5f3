import os
import sys
from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.runs import make_run

from mingpt.report.plot import LossPlot, thinned

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


def test_without_matplotlib_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    LossPlot(make_run(tmp_path)).close()
    assert caplog.messages == ["no loss.png: matplotlib is not installed"]
    assert list(tmp_path.iterdir()) == []


def test_a_curve_has_a_bounded_number_of_points_whose_mean_is_that_of_the_records() -> None:
    assert thinned(range(2000)) == list(range(2000))
    points = thinned(range(4001))
    assert len(points) == 1334
    assert points[:2] == [1.0, 4.0] and points[-1] == 3999.5


@pytest.mark.parametrize("function", ["write", "replace"])
def test_a_picture_that_cannot_be_written_is_one_line_and_the_next_one_is(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plot = LossPlot(make_run(tmp_path))
    disk = FaultyDisk(monkeypatch, function, "loss.png.partial", partly=function == "write")
    for step in (1, 2):
        plot.log(step, {"val/loss": 4.0})
        plot.wait()
    assert os.listdir(tmp_path) == []
    disk.broken = False
    plot.close()
    assert os.listdir(tmp_path) == ["loss.png"]
    path = tmp_path / "loss.png"
    assert caplog.messages == [
        f"{path} cannot be written (No space left on device): training goes on, and it is tried again",
        f"{path} is written again",
    ]


def test_an_error_of_the_library_is_no_reason_to_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    LossPlot(make_run(tmp_path)).close()
    assert "loss.png cannot be written (RuntimeError: no font)" in caplog.text
