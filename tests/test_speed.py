"""A guard against slowdowns that needs no quiet machine.

It measures what a micro-batch of the default run writes to memory, and what a start imports.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config import Config, ModelConfig
from mingpt.distributed.device import autocast
from mingpt.model import GPT

CONFIG = Config()
SIZE = CONFIG.trainer.micro_batch_size
WRITTEN_MB = {"modern": 58.3, "gpt2": 52.2}  # measured; a twentieth more is allowed
CPU = torch.device("cpu")


class Written(TorchDispatchMode):
    """Counts the bytes that operations write to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            in_place = func.name().partition(".")[0].endswith("_")
            if isinstance(tensor, Tensor) and (in_place or tensor.untyped_storage().data_ptr() not in known):
                self.bytes += tensor.nbytes
        return result


def micro_batch(arch: str) -> Callable[[], None]:
    """A function that makes the default run's forward and backward pass, as on a CPU that has bfloat16."""
    torch.manual_seed(0)
    config = ModelConfig(arch=arch)  # type: ignore[arg-type]
    model = GPT(config, vocab_size=65, block_size=CONFIG.data.block_size)
    tokens = torch.randint(0, 65, (SIZE, CONFIG.data.block_size))

    def run() -> None:
        with autocast(CPU, torch.bfloat16):
            loss = model(tokens, tokens)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


@pytest.mark.parametrize("arch", ["modern", "gpt2"])
def test_a_micro_batch_writes_no_more_to_memory_than_it_did(arch: str) -> None:
    work = micro_batch(arch)
    work()
    with Written() as written:
        work()
    written_mb, expected_mb = written.bytes / 1e6, WRITTEN_MB[arch]
    assert expected_mb * 0.8 < written_mb < expected_mb * 1.05, f"{written_mb:.1f} MB"


STARTING_PROGRAM = """
import sys
import torch
from mingpt.base.rows import RowMap
from mingpt.config import Config, ModelConfig
from mingpt.model import GPT
from mingpt.distributed.transport import Transport
from mingpt.optim import Optimizer
from mingpt.parallel.strategy import allocate
import mingpt.training.trainer, mingpt.distributed
weights = dict(GPT(Config().model, vocab_size=5, block_size=4).named_parameters())
shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
optimizer = Optimizer(weights, Config().optimizer, RowMap(shapes), Transport(0, 1))
for arch in ("modern", "gpt2"):
    with torch.device("meta"):
        model = GPT(ModelConfig(arch), vocab_size=5, block_size=4)
    allocate(model, torch.device("cpu"))
slow = ("torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor")
slow += ("matplotlib", "transformers", "mingpt.extras.ddp_hook", "mingpt.extras.shared_memory")
sys.exit(", ".join(name for name in slow if name in sys.modules) or 0)
"""


def test_model_and_optimizer_are_made_without_the_compiler_and_without_fsdp() -> None:
    """torch._dynamo takes as long to import as torch, sympy a fifth; a fresh process reports its imports."""
    done = subprocess.run(
        [sys.executable, "-c", STARTING_PROGRAM], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
