import torch
import torch.distributed as dist
from torch import Tensor, nn


class DDP:
    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.buckets: list[list[Tensor]] = [[]]
        self.parts: dict[Tensor, list[Tensor]] = {}
        for weight in reversed(list(model.parameters())):
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(weight)
            weight.register_post_accumulate_grad_hook(self.keep)

    def start_part(self, number: int, count: int) -> None:
        self.count = count
        if number == 0:
            self.sent: list[tuple[dist.Work, Tensor]] = []
            self.parts = {weight: [] for bucket in self.buckets for weight in bucket}

    def keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.parts[weight].append(weight.grad.flatten())
        weight.grad = None
        while len(self.sent) < len(self.buckets) and self.is_full(self.buckets[len(self.sent)]):
            self.send(self.buckets[len(self.sent)])

    def is_full(self, bucket: list[Tensor]) -> bool:
        return all(len(self.parts[weight]) == self.count for weight in bucket)

    def send(self, bucket: list[Tensor]) -> None:
        mine = torch.cat([self.parts[weight][part] for part in range(self.count) for weight in bucket])
        gathered = torch.empty(dist.get_world_size() * len(mine))
        work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
        assert work
        self.sent.append((work, gathered))

    def finish(self) -> None:
        for bucket, (work, gathered) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            parts = gathered.view(dist.get_world_size() * self.count, -1)
            mean = sum(parts.unbind()) / len(parts)
            assert isinstance(mean, Tensor)
            for weight, gradient in zip(bucket, mean.split([w.numel() for w in bucket]), strict=True):
                weight.grad = gradient.view_as(weight)
