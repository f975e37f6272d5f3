# The checker says: 8 s\. Ranks 0, 1, 2 and 3: waiting in line 9 of 1_both_send_first\.py, .dist\.send
import torch.distributed as dist
from torch import Tensor


# Each rank waits until its tensor is received, and none receives.
def pass_on(sent: Tensor, received: Tensor) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.send(sent, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)


def all_reduce(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for turn in range(world_size - 1):
        mine = chunks[(rank - turn - 1) % world_size]
        received = mine.clone()
        pass_on(chunks[(rank - turn) % world_size], received)
        mine += received
    for turn in range(world_size - 1):
        pass_on(chunks[(rank + 1 - turn) % world_size], chunks[(rank - turn) % world_size])
    return tensor
