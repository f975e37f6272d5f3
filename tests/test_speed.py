"""What a start imports: a guard against a slow start that needs no quiet machine."""

import subprocess
import sys

from mingpt.tools.jobs import ROOT

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
