"""The micro-batches that this rank computes: fetched, hashed for the audit, moved to the device, seeded."""

import itertools
import time

import torch
from torch import Tensor

from mingpt import events
from mingpt.audit import Audit
from mingpt.config import Config
from mingpt.data import Corpus, ElasticSampler, mix
from mingpt.distributed import DistributedContext
from mingpt.errors import UserError
from mingpt.report import StepTimer


class Batches:
    """Those of `steps` steps, in order.

    Data that cannot be used is an error of one rank, of which all ranks learn by `find_error`.
    """

    def __init__(
        self,
        config: Config,
        context: DistributedContext,
        corpus: Corpus,
        sampler: ElasticSampler,
        audit: Audit,
        timer: StepTimer,
        steps: int,
    ) -> None:
        self.config, self.context, self.audit, self.timer = config, context, audit, timer
        size = config.trainer.micro_batch_size
        starts = itertools.islice(sampler, steps * len(sampler.my_micro_batches()) * size)
        self.batches = corpus.train.batches(starts, size, context.device)
        self.error: str | None = None

    def next(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device, (B, T) each; seeds the micro-batch's dropout.

        Zeros once there is an `error`.
        """
        began = time.perf_counter()
        inputs, targets, *on_device = self.fetch()
        events.emit("batch", step=step, micro_batch=micro_batch, inputs=inputs, targets=targets)
        self.audit.add(micro_batch, inputs, targets)
        self.timer.data_s += time.perf_counter() - began
        if self.config.model.dropout:
            torch.manual_seed(mix(self.config.seed, step, micro_batch))
        return on_device[0], on_device[1]

    def fetch(self) -> tuple[Tensor, ...]:
        """Inputs and targets on the CPU, then on the device."""
        if self.error is None:
            try:
                return next(self.batches)
            except UserError as error:
                self.error = str(error)
        shape = self.config.trainer.micro_batch_size, self.config.data.block_size
        zeros = torch.zeros(shape, dtype=torch.long)
        return zeros, zeros, zeros.to(self.context.device), zeros.to(self.context.device)

    def find_error(self) -> str | None:
        """The first error of any rank. Collective."""
        errors = self.context.all_gather_object(self.error)
        return next((error for error in errors if error is not None), None)
