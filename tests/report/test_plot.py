import json
import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.plot import LossPlot

PNG = b"\x89PNG\r\n\x1a\n"


def write_records(run_dir: Path, steps: int) -> None:
    lines = []
    for step in range(1, steps + 1):
        lines.append(json.dumps({"step": step, "train/loss": 4.0 / step}))
        lines.append(json.dumps({"step": step, "val/loss": 5.0 / step}))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_an_evaluation_draws_the_picture(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    plot = LossPlot(make_run(tmp_path, restarts=[1, 2], floor=1.3))
    plot.log(3, {"val/loss": 1.6})
    assert plot.thread is not None
    plot.thread.join()
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_nothing_but_an_evaluation_draws(tmp_path: Path) -> None:
    plot = LossPlot(make_run(tmp_path))
    plot.log(3, {"train/loss": 1.6, "a metric of another kind": 3.0})
    plot.on_step(3)
    plot.rewind(2)
    plot.flush()
    assert plot.thread is None
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_draws_what_has_come_since(tmp_path: Path) -> None:
    write_records(tmp_path, 2)
    plot = LossPlot(make_run(tmp_path))
    plot.log(2, {"val/loss": 1.6})
    assert plot.thread is not None
    plot.thread.join()
    before = (tmp_path / "loss.png").read_bytes()
    write_records(tmp_path, 30)
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
