"""DistributedDataParallel, `trainer.reduction=fast`: its bits depend on the number of workers."""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from mingpt import events
from mingpt.parallel.strategy import Strategy, StrategySetup


class DDPReduction(Strategy):
    """Without a process group gradients accumulate in the model itself."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.ddp: DistributedDataParallel | None = None
        if setup.context.launch.is_distributed:
            # The buffers are constants: they need no broadcast.
            self.ddp = DistributedDataParallel(
                setup.forward, gradient_as_bucket_view=True, broadcast_buffers=False
            )
            self.forward = self.ddp
            self.loss_scale *= setup.context.world_size  # DDP takes the mean over the ranks

    def start_step(self) -> None:
        pass  # gradients were freed after the last step

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        is_last = number == self.my_micro_batches[-1]
        if is_last:
            events.emit("reduction_start")
        with contextlib.nullcontext() if is_last or self.ddp is None else self.ddp.no_sync():
            yield

    def finish_step(self) -> None:
        if not self.my_micro_batches and self.ddp is not None:
            self.dummy_backward()

    def dummy_backward(self) -> None:
        """A rank without micro-batches takes part in DDP's all-reduce with zeros."""
        device = self.setup.context.device
        tokens, targets = torch.zeros(2, *self.setup.batch_shape, dtype=torch.long, device=device)
        self.forward(tokens, targets).mul(0.0).backward()  # type: ignore[no-untyped-call]
