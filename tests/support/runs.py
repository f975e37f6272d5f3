"""A RunStart, and the StepStats of one step, for tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mingpt.config.cli import build
from mingpt.report import RunStart, StepStats

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


def make_run(
    run_dir: Path | str = "out/test",
    settings: dict[str, Any] | None = None,
    floor: float | None = None,
    **facts: Any,
) -> RunStart:
    """A RunStart of 30 steps. `floor` is the corpus's entropy_floor; `facts` replace fields of RunStart."""
    small = {"model.arch": "gpt2", "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32}
    config = build(small | {"run_dir": str(run_dir), "trainer.max_steps": 30} | (settings or {}))
    corpus: Any = SimpleNamespace(vocab_size=65, entropy_floor=floor)
    return RunStart(**{"config": config, "corpus": corpus, "run_id": "abc", "step": 0} | facts)
