# The checker says: Generation 2, .* 1 and 2 late: Not done after 8 s.*Rank 0 had finished\. Has another
import os

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    name = os.urandom(16).hex()
    if rank > 0:
        store.set(f"offer/{rank}", name)
        return store.get(f"answer/{name}").decode()
    for other in range(1, world_size):
        offer = store.get(f"offer/{other}").decode()
        store.set(f"answer/{offer}", name)
    return name
