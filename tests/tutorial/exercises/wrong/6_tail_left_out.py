# The checker says: Ranks 0 and 1: .*Numbers 5,680 to 5,680 have not changed: they are in no rank's share
import torch
import torch.distributed as dist
from torch import nn


class ShardedAdamW:
    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.size = sum(weight.numel() for weight in parameters) // dist.get_world_size()
        self.share = nn.Parameter(self.cut(nn.utils.parameters_to_vector(parameters)).clone())
        self.optimizer = torch.optim.AdamW([self.share], lr)

    def cut(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.detach()[self.size * dist.get_rank() :][: self.size]

    def step(self) -> float:
        for weight in self.parameters:
            assert weight.grad is not None
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        self.share.grad = self.cut(nn.utils.parameters_to_vector(gradients)).clone()
        self.optimizer.step()
        self.share.grad = None
        numbers = nn.utils.parameters_to_vector(self.parameters).detach()
        whole = numbers[: self.size * dist.get_world_size()]
        dist.all_gather_into_tensor(whole, self.share.detach())
        nn.utils.vector_to_parameters(numbers, self.parameters)
        return norm.item()
