import hashlib
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import yaml
from support.events import read_scalars
from support.faults import FaultyDisk
from support.jobs import SMALL
from support.runs import STATS, make_run

from mingpt.config import to_dict
from mingpt.data import make_corpus
from mingpt.distributed.device import Environment
from mingpt.report.log import FileHandler
from mingpt.report.metrics import PEAK_FLOPS, Sink, training_values
from mingpt.report.plot import LossPlot, the_figure
from mingpt.report.run_logger import RunLogger
from mingpt.report.writing import read_records

TEXT = b"To be, or not to be, that is the question.\n" * 40
ENVIRONMENT = Environment(
    torch="2",
    device="cpu AVX512",
    device_type="cpu",
    threads=1,
    numerics=1,
    code="ab" * 32,
    dtype="float32",
    kernels="none",
    compiled=False,
)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, which takes seconds; tests of jobs look for the pictures."""
    monkeypatch.setattr("mingpt.report.run_logger.SINKS", [])


def make_logger(run_dir: Path, settings: dict[str, Any] | None = None, **facts: Any) -> RunLogger:
    start = make_run(run_dir, SMALL | (settings or {}), run_id="abc123", **facts)
    return RunLogger(replace(start, corpus=make_corpus(TEXT, start.config.data)), ENVIRONMENT)


def read(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "run.json").read_text()))


def test_every_sink_is_told_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sink = Mock(return_value=Mock(spec=Sink))
    monkeypatch.setattr("mingpt.report.run_logger.SINKS", [make_sink])
    logger = make_logger(tmp_path)
    logger.log_training(STATS)
    logger.log_evaluation(12, {"val/loss": 1.25}, "To be")
    assert read(tmp_path)["status"] == "running"
    logger.ended(12, None, "snapshots", "cd" * 32)
    told = [call.log(12, training_values(STATS)), call.log(12, {"val/loss": 1.25}), call.close()]
    assert make_sink.return_value.mock_calls == told
    assert (make_sink.call_args.args[0].run_dir, read(tmp_path)["status"]) == (tmp_path, "finished")
    # Besides the settings, the bits depend on these.
    inputs = read(tmp_path)["inputs"]
    assert inputs["data"] == hashlib.sha256(TEXT).hexdigest() and len(inputs["tokenizer"]) == 64
    assert (inputs["software"], read(tmp_path)["weights_sha256"]) == (asdict(ENVIRONMENT), "cd" * 32)
    make_logger(tmp_path)
    assert read(tmp_path)["weights_sha256"] == ""  # the run goes on, and its weights are not final any more


def test_a_run_is_followed_where_it_is_asked_for_and_by_rank_0_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked: dict[str, Any] = {"report.tensorboard": True, "report.tracker": "wandb"}
    for name, is_main in (("one", True), ("two", False)):
        logger = make_logger(tmp_path / name, asked, is_main=is_main)
        logger.log_training(STATS)
        logger.ended(STATS.step, None, "snapshots", "")
    assert [path.parent.name for path in tmp_path.glob("*/tensorboard")] == ["one"]
    (line,) = [message for message in caplog.messages if "report." in message]
    assert line.startswith("report.tracker=wandb fails (ModuleNotFoundError: ")
    assert read_scalars(tmp_path / "one")["train/loss"] == [(STATS.step, STATS.loss)]


@pytest.mark.parametrize("function", ["write", "fsync", "replace", "rename"])
def test_a_run_folder_that_cannot_be_written_ends_no_run(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file is reported once, log.txt too, and all are complete once there is room."""
    to_file = FileHandler(tmp_path / "log.txt", lambda: True)
    monkeypatch.setattr(logging.getLogger("mingpt"), "handlers", [to_file])
    make_logger(tmp_path).log_values(1, {"train/loss": 1.0})
    disk = FaultyDisk(monkeypatch, function, str(tmp_path))
    logger = make_logger(tmp_path)
    for step in range(1, 5):
        logger.log_training(replace(STATS, step=step))
        logger.flush()
    logger.history.record({}, {})
    names = [message.split(" cannot")[0] for message in caplog.messages if "cannot be written" in message]
    assert len(names) == len(set(names))
    disk.broken = False
    logger.ended(4, None, "snapshots", "")
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert (steps, read(tmp_path)["status"]) == ([1, 2, 3, 4], "finished")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == to_dict(logger.start.config)
    assert sum(message.endswith("is written again") for message in caplog.messages) == len(names)
    assert not any(".partial" in path.name for path in tmp_path.iterdir())
    assert all(name in (tmp_path / "log.txt").read_text() for name in names)


@pytest.mark.parametrize(("name", "part"), [("NVIDIA H200", "H200"), ("NVIDIA H100 PCIe", "H100 PCIe")])
def test_every_metric_has_its_value_and_utilization_is_the_part_of_the_peak_of_all_devices(
    name: str, part: str
) -> None:
    expected = {"train/loss": 1.5, "lr": 0.01, "grad_norm": 0.7, "step_s": 0.5, "data_s": 0.1} | {
        "tokens": 96 * 32,
        "tokens_per_s": 8 * 32 / 0.5,
        "mfu": pytest.approx(1e6 * (8 * 32 / 0.5) / (2 * PEAK_FLOPS[part])),
    }
    values = training_values(replace(STATS, device_name=name))
    assert {name: values[name] for name in expected} == expected


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
