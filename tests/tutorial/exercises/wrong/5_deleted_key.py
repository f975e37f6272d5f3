# The checker says: Generation 1, .* rank 0 late: .* name of ranks 1 and 2 is that of generation 0, left
import os

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    if rank == 0:
        store.delete_key("generation")
        store.set("generation", os.urandom(16).hex())
    return store.get("generation").decode()
