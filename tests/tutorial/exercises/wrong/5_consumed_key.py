# The checker says: after rank 1 was killed before its write 0, delete_key.* The name of rank 1 is that of
import os

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    if rank > 0:
        name = store.get(f"name/{rank}").decode()
        store.delete_key(f"name/{rank}")
        return name
    name = os.urandom(16).hex()
    for other in range(1, world_size):
        store.set(f"name/{other}", name)
    return name
