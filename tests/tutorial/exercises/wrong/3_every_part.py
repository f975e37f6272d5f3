# The checker says: \d+ collectives in a step of 4 parts, \d in a step of one.*reduce_every_micro_batch\.py
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
        self.count = count
        self.there: dict[Tensor, Tensor] = {}
        if number == 0:
            self.sent: list[tuple[list[Tensor], dist.Work, Tensor]] = []
            self.first = 0
        self.first = len(self.sent)

    def arrived(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.there[weight] = weight.grad.flatten()
        weight.grad = None
        while len(self.sent) - self.first < len(self.buckets):
            bucket = self.buckets[len(self.sent) - self.first]
            if not self.there.keys() >= set(bucket):
                break
            flat = torch.cat([self.there[weight] for weight in bucket])
            work = dist.all_reduce(flat, async_op=True)
            assert work
            self.sent.append((bucket, work, flat))

    def finish(self) -> None:
        for bucket, work, flat in self.sent:
            work.wait()
            flat /= dist.get_world_size() * self.count
            for weight, gradient in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
                old = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = old + gradient.view_as(weight)
