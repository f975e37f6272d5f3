from dataclasses import replace

import pytest
from support.runs import STATS

from mingpt.report.metrics import PEAK_FLOPS, training_values


def test_every_metric_of_a_step_has_its_value() -> None:
    values = training_values(STATS)
    assert values == values | {
        "train/loss": 1.5,
        "lr": 0.01,
        "grad_norm": 0.7,
        "tokens": 96 * 32,
        "tokens_per_s": 8 * 32 / 0.5,
        "step_s": 0.5,
        "data_s": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE"),
    ],
)
def test_utilization_is_the_part_of_the_peak_of_all_devices(name: str, part: str) -> None:
    expected = 1e6 * (8 * 32 / 0.5) / (2 * PEAK_FLOPS[part])
    assert training_values(replace(STATS, device_name=name))["mfu"] == pytest.approx(expected)
