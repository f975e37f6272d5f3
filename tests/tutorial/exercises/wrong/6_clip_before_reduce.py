# The checker says: Ranks 0 and 1: .*norm of each rank's own windows\..*mistakes/clip_before_reduce\.py
import torch
import torch.distributed as dist
from torch import nn


class ShardedAdamW:
    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.mine = parameters[dist.get_rank() :: dist.get_world_size()]
        self.optimizer = torch.optim.AdamW(self.mine, lr)

    def step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        for weight in self.parameters:
            assert weight.grad is not None
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        self.optimizer.step()
        for number, weight in enumerate(self.parameters):
            dist.broadcast(weight.detach(), number % dist.get_world_size())
        return norm.item()
