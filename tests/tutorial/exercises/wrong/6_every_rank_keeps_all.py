# The checker says: Ranks 0 and 1: between steps .*Each rank keeps the averages of all numbers, 45,448 bytes
import torch
import torch.distributed as dist
from torch import nn


class ShardedAdamW:
    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.optimizer = torch.optim.AdamW(parameters, lr)

    def step(self) -> float:
        for weight in self.parameters:
            assert weight.grad is not None
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()
        return norm.item()
