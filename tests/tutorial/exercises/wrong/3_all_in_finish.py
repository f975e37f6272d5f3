# The checker says: \d collectives in a step: nothing is sent in the backward pass
import torch
import torch.distributed as dist
from torch import Tensor, nn


class DDP:
    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.buckets: list[list[Tensor]] = [[]]
        for weight in reversed(list(model.parameters())):
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(weight)

    def start_part(self, number: int, count: int) -> None:
        self.count = count

    def finish(self) -> None:
        for bucket in self.buckets:
            flat = torch.cat([weight.grad.flatten() for weight in bucket if weight.grad is not None])
            dist.all_reduce(flat)
            flat /= dist.get_world_size() * self.count
            for weight, gradient in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
                weight.grad = gradient.view_as(weight)
