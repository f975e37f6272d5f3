"""What a plan says of known configurations, beside tensors that are really kept; and its sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import refused, run_here

from mingpt.config import Config
from mingpt.config.cli import build
from mingpt.model import GPT, LossModule
from mingpt.tools.plan import activations, estimate, main

TINY = ["model.n_layer=1", "model.n_embd=16", "data.block_size=32"]
GPT2 = 124_439_808


def gpt2(**settings: Any) -> Config:
    flat = {"model.arch": "gpt2", "model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768}
    flat |= {"data.block_size": 1024, "trainer.batch_size": 16, "trainer.micro_batch_size": 1}
    return build(flat | {"optimizer.name": "adamw"} | {f"trainer.{key}": settings[key] for key in settings})


def test_what_is_sharded_is_held_once_by_all_workers_together() -> None:
    sharding: list[dict[str, Any]] = [{}, {"shard_optimizer": True}, {"parallel": "fsdp"}]
    ddp, sharded, fsdp = (estimate(gpt2(**one), 50257, 4, True, 4) for one in sharding)
    found = [[needs["weights"] / GPT2, needs["optimizer"] / GPT2] for needs in (ddp, sharded, fsdp)]
    assert found == [pytest.approx(sizes, rel=1e-3) for sizes in ([4, 8], [4, 2], [1, 2])]
    assert fsdp["host: copy for snapshots"] == pytest.approx(3 * GPT2, rel=1e-3)
    assert fsdp["host: snapshots in memory"] == pytest.approx(24 * GPT2, rel=1e-3)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize(("element", "block_size"), [(2, 192), (4, 600)])
def test_activations_are_right_to_a_third(arch: str, element: int, block_size: int) -> None:
    flat = {"model.arch": arch, "model.n_layer": 2, "model.n_head": 4, "model.n_embd": 256}
    config = build(flat | {"data.block_size": block_size, "trainer.micro_batch_size": 8})
    trained = LossModule(GPT(config.model, vocab_size=2, block_size=block_size))
    tokens = torch.zeros(2, config.trainer.micro_batch_size, block_size, dtype=torch.long)
    weights = {weight.data_ptr() for weight in trained.parameters()}
    kept = dict[int, int]()  # {address: bytes} of what is kept for the backward pass

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=element == 2):
        loss = trained(*tokens)
    measured = sum(size for address, size in kept.items() if address not in weights)
    assert loss.requires_grad and activations(config, element) == pytest.approx(measured, rel=1 / 3)


@pytest.mark.parametrize(
    ("memory", "end"),
    [
        ("80GB", "trainer.parallel=ddp trainer.shard_optimizer=false fits"),
        ("14GB", "trainer.parallel=fsdp fits"),
        ("1GB", "none fits: take more workers, a smaller trainer.micro_batch_size or model"),
    ],
)
def test_a_plan_is_one_screen_and_ends_with_the_first_strategy_that_fits(
    memory: str, end: str, text: Path
) -> None:
    words = [f"data.path={text}", "model.n_layer=48", "model.n_embd=1600", "model.n_head=25"]
    lines = run_here(main, *words, "--workers", 8, "--gpu_memory", memory).stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and lines[-1] == end


@pytest.mark.slow
def test_the_steps_that_fit_into_a_time_are_measured_and_nothing_stays(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"data.path={text}", *TINY, "trainer.pause_after=1", "snapshot.path=kept", "trainer.workers=1"]
    first, second, _, last = run_here(main, *words, "--time", "1h").stdout.splitlines()
    step_s, rest_s = float(first.split()[3]), float(second.split()[-2])
    steps = int(last.removeprefix("trainer.max_steps="))
    assert steps == pytest.approx((3600 - rest_s) / step_s, rel=0.01)
    assert list(tmp_path.iterdir()) == []
    assert "20 steps cannot be trained: data.path nowhere" in refused(
        main, "data.path=nowhere", "--time", "9"
    )
