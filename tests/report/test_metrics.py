from dataclasses import replace

import pytest
from support.runs import STATS

from mingpt.report import METRICS
from mingpt.report.metrics import PEAK_FLOPS, peak_flops, training_values


def test_every_metric_of_a_step_has_its_value() -> None:
    assert training_values(STATS) == {
        "train/loss": 1.5,
        "lr": 0.01,
        "grad_norm": 0.7,
        "tokens": 96 * 32,
        "tokens_per_s": 8 * 32 / 0.5,
        "step_s": 0.5,
        "data_s": 0.1,
    }


def test_utilization_is_the_part_of_the_peak_of_all_devices() -> None:
    stats = replace(STATS, device_name="NVIDIA H200")
    expected = 1e6 * (8 * 32 / 0.5) / (2 * PEAK_FLOPS["H200"])
    assert training_values(stats)["mfu"] == pytest.approx(expected)
    assert peak_flops("a device of the future") is None


def test_a_metric_is_added_by_registering_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "double", lambda stats: 2 * stats.loss)
    monkeypatch.setitem(METRICS, "unknown", lambda _: None)
    values = training_values(STATS)
    assert values["double"] == 3.0
    assert "unknown" not in values
