# The checker says: The name of ranks 1 and 2 is that of generation 0, left in the store by a dead worker
import os

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    if rank == 0:
        store.set("generation", os.urandom(16).hex())
    return store.get("generation").decode()
