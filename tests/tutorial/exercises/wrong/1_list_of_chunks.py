# The checker says: in line 7 of 1_list_of_chunks\.py, .return tensor\.chunk.*: IndexError
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_world_size()]
