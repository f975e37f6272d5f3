"""A run and a step for tests."""

from pathlib import Path

from mingpt.report.metrics import RunInfo, StepStats

STATS = StepStats(
    step=12,
    loss=1.5,
    lr=0.01,
    grad_norm=0.7,
    windows_seen=96,
    block_size=32,
    batch_size=8,
    step_s=0.5,
    data_s=0.1,
    flops_per_token=1e6,
    world_size=2,
    device_name="cpu AVX512",
)


def make_run(run_dir: Path, *, restarts: list[int] | None = None, floor: float | None = None) -> RunInfo:
    model = {"arch": "gpt2", "n_layer": 2, "n_embd": 32}
    return RunInfo(run_dir, 30, 0, restarts or [], floor, settings={"model": model}, parameters=1_234)
