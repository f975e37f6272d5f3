"""The formulas of what a micro-batch keeps, beside the tensors that are really alive."""

from typing import Any, Literal

import pytest
import torch
from support.alive import AliveTensors

from mingpt.config import Config, DataConfig, ModelConfig, TrainerConfig
from mingpt.model import GPT, LossModule, loss
from mingpt.model.cpu_ops import gelu_tables
from mingpt.tools.plan import costs
from mingpt.tools.plan.workload import Workload

Arch = Literal["gpt2", "modern"]
VOCAB_SIZE = 300


def workload(
    arch: Arch, dtype: str, *, block_size: int = 192, dropout: float = 0.0, **trainer: Any
) -> Workload:
    config = Config(
        data=DataConfig(block_size=block_size),
        model=ModelConfig(arch=arch, n_layer=3, n_head=4, n_embd=64, dropout=dropout),
        trainer=TrainerConfig(micro_batch_size=2, **trainer),
    )
    return Workload(config, VOCAB_SIZE, workers=1, on_cpu=True, dtype=dtype)


def measure(work: Workload) -> tuple[int, int]:
    """Bytes that a forward pass leaves, and the most that there are beside the weights in both passes."""
    config = work.config
    model = GPT(config.model, vocab_size=VOCAB_SIZE, block_size=config.data.block_size)
    model.set_recompute(config.trainer.recompute == "block")
    trained = LossModule(model)
    tokens = torch.randint(0, VOCAB_SIZE, (config.trainer.micro_batch_size, config.data.block_size))
    is_mixed = work.dtype == "bfloat16"
    gelu_tables()  # computed once in a process, whichever test is the first
    alive = AliveTensors()
    with alive:
        for tensor in (*model.parameters(), *model.buffers()):
            alive.add(tensor)
        before = alive.now_bytes
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            value = trained(tokens, tokens)
        left = alive.now_bytes - before
        value.backward()
    return left, alive.peak_bytes - before


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("more", "max_logits"),
    [
        ({}, loss.MAX_LOGITS),
        ({"dropout": 0.1}, loss.MAX_LOGITS),
        ({"block_size": 600}, loss.MAX_LOGITS),
        ({"recompute": "block"}, loss.MAX_LOGITS),
        ({}, 128 * VOCAB_SIZE),
    ],
    ids=["plain", "dropout", "flash attention", "recompute", "loss in chunks"],
)
def test_what_a_forward_pass_keeps_is_the_formula(
    arch: Arch, dtype: str, more: dict[str, Any], max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "MAX_LOGITS", max_logits)
    work = workload(arch, dtype, **more)
    left, peak = measure(work)
    expected = costs.kept(work) + costs.casts(work)
    assert left == pytest.approx(expected, rel=0.02)
    work_bytes = max(costs.loss_work(work), costs.backward_work(work))
    assert expected < peak < 1.1 * (expected + work_bytes + 4 * work.parameters)
