"""Which strategies there are."""

from mingpt.parallel.ddp import DDPReduction
from mingpt.parallel.exact import ExactReduction
from mingpt.parallel.strategy import Strategy

# By the name in `trainer.reduction`.
STRATEGIES: dict[str, type[Strategy]] = {
    "exact": ExactReduction,
    "fast": DDPReduction,
}
