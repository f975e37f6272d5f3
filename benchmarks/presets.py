"""The table of configs/README.md: what each preset trains, and what that costs by arithmetic alone.

python benchmarks/presets.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from mingpt.config import Config
from mingpt.config.cli import parse
from mingpt.model import GPT, parameter_shapes
from mingpt.optim import state_shapes
from mingpt.tools.jobs import ROOT

SHAKESPEARE_CHARACTERS = 65
HEADER = (
    "| preset | parameters | tokens per step | steps | tokens | FLOP | weights and optimizer |\n"
    "|---|---|---|---|---|---|---|"
)


def describe(path: Path) -> str:
    """A row of the table: FLOP of forward and backward passes (Chowdhery et al. 2022), state in float32."""
    config: Config = parse([str(path)])
    vocab_size = config.data.vocab_size or SHAKESPEARE_CHARACTERS
    block_size, trainer = config.data.block_size, config.trainer
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=vocab_size, block_size=block_size)
    parameters = sum(weight.numel() for weight in model.parameters())
    shapes = parameter_shapes(config.model, vocab_size=vocab_size, block_size=block_size)
    states = state_shapes(shapes, config.optimizer)
    state_bytes = 4 * sum(torch.Size(shape).numel() for shape in (*shapes.values(), *states.values()))
    per_step = trainer.batch_size * block_size
    tokens = per_step * trainer.max_steps
    return (
        f"| `{path.name}` | {parameters / 1e6:.1f} M | {per_step:,} | {trainer.max_steps:,} | "
        f"{tokens / 1e9:.2f} G | {model.flops_per_token() * tokens:.1e} | {state_bytes / 1e9:.2f} GB |"
    )


def table() -> str:
    return "\n".join([HEADER, *map(describe, sorted((ROOT / "configs").glob("*.yaml")))])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
