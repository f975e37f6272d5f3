"""Validation loss over the whole validation split, and a sample of text."""

import itertools
import math

import torch
from torch import Tensor

from mingpt import events
from mingpt.config import Config
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import autocast
from mingpt.model import GPT, generate

MIN_BATCH_TOKENS = 4096  # without a backward pass there is room, and small batches cost more


class Evaluator:
    """Evaluates `model`; the ranks take batches in turn, and the result does not depend on their number."""

    def __init__(
        self, config: Config, context: DistributedContext, model: GPT, corpus: Corpus, dtype: torch.dtype
    ) -> None:
        self.config, self.context, self.model, self.corpus, self.dtype = config, context, model, corpus, dtype

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean loss in nats over every token of the split, dropout off. Collective."""
        events.emit("evaluation_start", step=step)
        targets = len(self.corpus.val.tokens) - 1
        losses = self.context.run_with_heartbeat(self.local_losses)
        losses = self.context.all_reduce(losses)
        nats = math.fsum(losses.tolist())
        return {"val/loss": nats / targets, "val/bits_per_byte": nats / math.log(2) / self.corpus.val_bytes}

    @torch.no_grad()
    def local_losses(self) -> Tensor:
        """(batches,) nats of each batch; zero for those of other ranks."""
        block_size, device = self.config.data.block_size, self.context.device
        batch_size = max(self.config.trainer.micro_batch_size, MIN_BATCH_TOKENS // block_size)
        losses = torch.zeros(
            len(self.corpus.val.tokens) // (batch_size * block_size) + 2, dtype=torch.float64
        )
        batches = enumerate(self.corpus.val.eval_batches(batch_size))
        self.model.eval()
        for number, (inputs, targets) in itertools.islice(
            batches, self.context.rank, None, self.context.world_size
        ):
            with autocast(device, self.dtype):
                _, loss = self.model(inputs.to(device), targets.to(device))
            losses[number] = float(loss) * targets.numel()
        self.model.train()
        return losses

    def sample(self) -> str:
        """Text from the default prompt, without the prompt; the same on the same kind of device."""
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.encode(tokenizer.default_prompt()).tolist()
        tokens = generate(self.model, prompt, self.config.trainer.sample_tokens, seed=self.config.seed)
        return tokenizer.decode(list(tokens))
