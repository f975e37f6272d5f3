"""The table of configs/README.md, made from the configurations; nothing is measured.

    python benchmarks/table.py

A test compares the table that this program prints with the page. Takes seconds, anywhere.
"""

import sys
from pathlib import Path

from common import argument_parser

from mingpt.tools.jobs import ROOT

SHAKESPEARE_CHARACTERS = 65
PRESETS = [
    "| preset | parameters | tokens per step | steps | tokens | FLOP | weights and optimizer |",
    "|---|---|---|---|---|---|---|",
]


def preset(path: Path) -> str:
    """Return a preset's line of the table.

    FLOP are those of forward and backward passes (Chowdhery et al. 2022). The last column is for float32.
    """
    import torch

    from mingpt.config.cli import parse
    from mingpt.model import GPT, parameter_shapes
    from mingpt.optim import state_shapes

    config = parse([str(path)])
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
        f"{tokens / 1e9:.3g} G | {model.flops_per_token() * tokens:.1e} | {state_bytes / 1e9:.3g} GB |"
    )


def main() -> int:
    argument_parser(__doc__).parse_args()
    lines = [*PRESETS, *map(preset, sorted((ROOT / "configs").glob("*.yaml")))]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
