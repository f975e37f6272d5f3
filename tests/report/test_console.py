import logging
import sys
from pathlib import Path

import pytest
from support.runs import make_run

from mingpt.report.log import ConsoleSink


def test_without_a_terminal_each_record_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    sink = ConsoleSink(make_run(tmp_path))
    sink.on_step(10)
    sink.log(10, {"train/loss": 2.5, "lr": 0.007, "tokens_per_s": 12345.6, "step_s": 0.5, "tokens": 9})
    sink.log(10, {"val/loss": 2.25, "val/bits_per_byte": 3.2})
    sink.close()
    assert caplog.messages == [
        "step 10/30  loss 2.5000  lr 7.00e-03  12,346 tokens/s  10 s left",
        "step 10/30  val/loss 2.2500  val/bits_per_byte 3.2000",
    ]


def test_on_a_terminal_training_is_a_bar(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    sink = ConsoleSink(make_run(tmp_path))
    sink.log(1, {"train/loss": 2.5})
    for step in range(1, 31):
        sink.on_step(step)
    sink.close()
    output = capsys.readouterr().err
    assert caplog.messages == [] and "30/30" in output and "loss 2.5000" in output
