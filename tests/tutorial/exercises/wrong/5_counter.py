# The checker says: Generation 3, 2 workers.*Not done after 8 s.*Has another rank taken a dead worker's key
from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    arrived = store.add("arrived", 1)
    generation = (arrived - 1) // world_size
    if arrived % world_size == 0:
        store.set(f"all here/{generation}", "yes")
    store.get(f"all here/{generation}")
    return str(generation)
