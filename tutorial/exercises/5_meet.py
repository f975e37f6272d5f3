"""Exercise 5: write how workers meet again after a restart. The problem: tutorial/exercises/5_meet.md

python -m tutorial.check 5
"""

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    """Return a name for this generation: the same on all its ranks, and never returned before.

    Every worker of every generation calls it once. A generation begins when all workers of the one before
    are dead, of which each may have died anywhere in `meet`, or after it. `store` has all that they wrote.
    Workers start in any order, and the next generation may have another number of them. Nothing that
    torchrun tells a worker is known to be new, or to be the same on all ranks, but `world_size`.
    """
    raise NotImplementedError("meet")
