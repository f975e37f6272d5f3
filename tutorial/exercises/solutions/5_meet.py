import os
import time

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    name = os.urandom(16).hex()
    if rank > 0:
        store.set(f"offer/{rank}", name)
        generation = store.get(f"answer/{name}").decode()
        store.set(f"{generation}/{rank}", "met")
        return generation
    for other in range(1, world_size):
        while not store.check([f"{name}/{other}"]):
            offer = store.get(f"offer/{other}").decode()
            store.set(f"answer/{offer}", name)
            time.sleep(0.01)
    return name
