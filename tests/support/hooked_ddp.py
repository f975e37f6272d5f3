"""A strategy for tests: DistributedDataParallel with ExactHook. The import enters it in STRATEGIES."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mingpt.parallel import STRATEGIES, ExactHook, ddp
from mingpt.parallel.strategy import Forward


class HookedDDP(ddp.DDPReduction):
    def prepare(self, forward: Forward) -> None:
        if not dist.is_initialized():  # there is a single rank
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(forward, bucket_cap_mb=ddp.BUCKET_BYTES / 2**20)  # type: ignore[arg-type]
        model.register_comm_hook(ExactHook(model, self.setup.micro_batches), ExactHook.reduce)
        self.forward, self.no_sync = model, model.no_sync


STRATEGIES["ddp", "hook"] = HookedDDP
