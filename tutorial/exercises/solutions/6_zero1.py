import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters, self.max_norm = parameters, max_norm
        self.sizes = [weight.numel() for weight in parameters]
        self.share_size = -(-sum(self.sizes) // dist.get_world_size())
        mine = self.join([weight.detach() for weight in parameters]).chunk(dist.get_world_size())
        self.share = nn.Parameter(mine[dist.get_rank()].clone())
        self.optimizer = torch.optim.AdamW([self.share], lr)

    def join(self, tensors: list[Tensor]) -> Tensor:
        """All numbers in a row, with zeros at the end, so that W divides their number."""
        length = dist.get_world_size() * self.share_size
        return pad(torch.cat([tensor.flatten() for tensor in tensors]), (0, length - sum(self.sizes)))

    @torch.no_grad()
    def step(self) -> float:
        gradients = self.join([weight.grad for weight in self.parameters if weight.grad is not None])
        mine = torch.empty(self.share_size)
        dist.reduce_scatter_tensor(mine, gradients)
        mine /= dist.get_world_size()
        square = mine.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.share.grad = mine * (self.max_norm / norm).clamp(max=1.0)
        self.optimizer.step()
        self.share.grad = None
        dist.all_gather_into_tensor(gradients, self.share)
        for weight, new in zip(self.parameters, gradients[: sum(self.sizes)].split(self.sizes), strict=True):
            weight.copy_(new.view_as(weight))
        return norm.item()
