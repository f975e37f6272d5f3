# The checker says: Ranks 0, 1, 2 and 3: losses are right, but a rank sends \S+ bytes in a step\.
import torch
import torch.distributed as dist
from torch import nn


class ShardedAdamW:
    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.size = -(-sum(weight.numel() for weight in parameters) // dist.get_world_size())
        self.share = nn.Parameter(self.cut(nn.utils.parameters_to_vector(parameters)))
        self.optimizer = torch.optim.AdamW([self.share], lr)

    def cut(self, numbers: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(self.size)
        found = numbers.detach()[self.size * dist.get_rank() :][: self.size]
        share[: len(found)] = found
        return share

    def step(self) -> float:
        for weight in self.parameters:
            assert weight.grad is not None
            of_ranks = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, weight.grad)
            weight.grad = torch.stack(of_ranks).mean(0)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        self.share.grad = self.cut(nn.utils.parameters_to_vector(gradients))
        self.optimizer.step()
        self.share.grad = None
        whole = torch.empty(self.size * dist.get_world_size())
        dist.all_gather_into_tensor(whole, self.share.detach())
        nn.utils.vector_to_parameters(whole, self.parameters)
        return norm.item()
