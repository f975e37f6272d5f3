"""Which strategies there are."""

from mingpt.parallel.ddp import DDPReduction
from mingpt.parallel.exact import ExactReduction
from mingpt.parallel.fsdp import ExactFSDPReduction, FSDPReduction
from mingpt.parallel.strategy import Strategy

# By `trainer.parallel` and `trainer.reduction`.
STRATEGIES: dict[tuple[str, str], type[Strategy]] = {
    ("ddp", "exact"): ExactReduction,
    ("ddp", "fast"): DDPReduction,
    ("fsdp", "exact"): ExactFSDPReduction,
    ("fsdp", "fast"): FSDPReduction,
}
