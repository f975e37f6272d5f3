# The checker says: not where rank 1 computes .right. .*follow the order of arrival
import torch
import torch.distributed as dist
from torch import Tensor, nn


class DDP:
    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.bucket_bytes, self.parameters = bucket_bytes, len(list(model.parameters()))
        self.parts: dict[Tensor, list[Tensor]] = {}
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(self.keep)

    def start_part(self, number: int, count: int) -> None:
        self.count = count
        if number == 0:
            self.parts, self.bucket, self.done = {}, list[Tensor](), 0
            self.sent: list[tuple[list[Tensor], dist.Work, Tensor]] = []

    def keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.parts.setdefault(weight, []).append(weight.grad.flatten())
        weight.grad = None
        if len(self.parts[weight]) < self.count:
            return
        self.bucket.append(weight)
        self.done += 1
        if sum(other.nbytes for other in self.bucket) >= self.bucket_bytes or self.done == self.parameters:
            mine = torch.cat(
                [self.parts[weight][part] for part in range(self.count) for weight in self.bucket]
            )
            gathered = torch.empty(dist.get_world_size() * len(mine))
            work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
            assert work
            self.sent.append((self.bucket, work, gathered))
            self.bucket = []

    def finish(self) -> None:
        for bucket, work, gathered in self.sent:
            work.wait()
            parts = gathered.view(dist.get_world_size() * self.count, -1)
            for weight, gradient in zip(
                bucket, parts.mean(0).split([w.numel() for w in bucket]), strict=True
            ):
                weight.grad = gradient.view_as(weight)
