"""Ways to sum gradients across workers and to hold parameters, behind one interface, `Strategy`.

A training loop, that of the trainer or your own, calls `loss.backward()` inside a strategy's `micro_batch`
context; the loop is the same for every strategy. ExactHook (hook.py) is for a loop that uses
DistributedDataParallel instead of a strategy.
"""

from mingpt.parallel.ddp import DDPReduction
from mingpt.parallel.exact import ExactReduction
from mingpt.parallel.fsdp import ExactFSDPReduction, FSDPReduction
from mingpt.parallel.hook import ExactHook
from mingpt.parallel.strategy import STRATEGIES, Strategy, StrategySetup, digest

__all__ = ["STRATEGIES", "ExactHook", "ExactReduction", "Strategy", "StrategySetup", "digest"]

STRATEGIES["ddp", "exact"] = ExactReduction
STRATEGIES["ddp", "fast"] = DDPReduction
STRATEGIES["fsdp", "exact"] = ExactFSDPReduction
STRATEGIES["fsdp", "fast"] = FSDPReduction
