# The checker says: The ranks have different names, 0, 1, 1\. .* made from a number that is not new
import os

from torch.distributed import Store


def meet(store: Store, rank: int, world_size: int) -> str:
    return os.environ["TORCHELASTIC_RESTART_COUNT"]
