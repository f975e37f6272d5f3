"""How gradients are summed across workers, and who holds which parameter: one interface, `Strategy`.

The trainer calls `loss.backward()` inside a strategy's `micro_batch` context and knows nothing else of it.
"""

from mingpt.parallel.ddp import DDPReduction
from mingpt.parallel.exact import ExactReduction
from mingpt.parallel.registry import STRATEGIES
from mingpt.parallel.shards import split_rows
from mingpt.parallel.strategy import Strategy, StrategySetup

__all__ = ["STRATEGIES", "DDPReduction", "ExactReduction", "Strategy", "StrategySetup", "split_rows"]
