"""Ways to sum gradients across workers and to hold parameters, behind one interface, `Strategy`.

A training loop, that of the trainer or your own, calls `loss.backward()` inside a strategy's `micro_batch`
context; the loop is the same for every strategy. ExactHook (mingpt/extras/ddp_hook.py) is for a loop that
uses DistributedDataParallel instead of a strategy.
"""

import pkgutil
from typing import Any

from mingpt.parallel.ddp import DDPReduction
from mingpt.parallel.exact import ExactReduction
from mingpt.parallel.fsdp import ExactFSDPReduction, FSDPReduction
from mingpt.parallel.strategy import STRATEGIES, Strategy, StrategySetup, digest

# `__all__` has the names that each copy of the program has.
__all__ = ["STRATEGIES", "ExactReduction", "Strategy", "StrategySetup", "digest"]

STRATEGIES["ddp", "exact"] = ExactReduction
STRATEGIES["ddp", "fast"] = DDPReduction
STRATEGIES["fsdp", "exact"] = ExactFSDPReduction
STRATEGIES["fsdp", "fast"] = FSDPReduction

# Further names of this package, as "module:name"; the module is imported when the name is asked for.
EXTRAS = {"ExactHook": "mingpt.extras.ddp_hook:ExactHook"}


def __getattr__(name: str) -> Any:
    """Return the object `name` of this package; EXTRAS says in which module it is.

    Raises AttributeError if EXTRAS has no such name. Raises the errors of importing the module.
    """
    if name not in EXTRAS:
        raise AttributeError(f"module 'mingpt.parallel' has no attribute {name!r}")
    return pkgutil.resolve_name(EXTRAS[name])
