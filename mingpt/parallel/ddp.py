"""DistributedDataParallel, `trainer.reduction=fast`: its bits depend on the number of workers."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from mingpt import events
from mingpt.parallel.strategy import Forward
from mingpt.parallel.whole_weights import WholeWeights

# broadcast_buffers is the name before torch 2.13.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


class DDPReduction(WholeWeights):
    """Without a process group gradients accumulate in the model itself."""

    ddp: DistributedDataParallel | None = None

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward = forward
        if self.context.launch.is_distributed:
            # The buffers are constants: they need no broadcast before each forward pass.
            options: dict[str, Any] = {"gradient_as_bucket_view": True, SYNC_BUFFERS: False}
            self.ddp = DistributedDataParallel(forward, **options)  # type: ignore[arg-type]
            self.forward = self.ddp
            self.loss_scale *= self.world_size  # DDP takes the mean over the ranks

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
