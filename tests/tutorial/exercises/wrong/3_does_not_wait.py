# The checker says: inish returned before \d of \d collectives were waited for
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
            weight.register_post_accumulate_grad_hook(self.arrived)

    def start_part(self, number: int, count: int) -> None:
        self.is_last, self.count = number == count - 1, count
        self.there: set[Tensor] = set()
        if number == 0:
            self.sent: list[tuple[list[Tensor], dist.Work, Tensor]] = []

    def arrived(self, weight: Tensor) -> None:
        self.there.add(weight)
        while self.is_last and len(self.sent) < len(self.buckets):
            bucket = self.buckets[len(self.sent)]
            if not self.there.issuperset(bucket):
                break
            flat = torch.cat([weight.grad.flatten() for weight in bucket if weight.grad is not None])
            work = dist.all_reduce(flat, async_op=True)
            assert work
            self.sent.append((bucket, work, flat))

    def finish(self) -> None:
        for bucket, _, flat in self.sent:
            flat /= dist.get_world_size() * self.count
            for weight, gradient in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
                weight.grad = gradient.view_as(weight)
