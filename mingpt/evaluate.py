"""Validation loss over the whole validation split, and a sample of text."""

import itertools
import logging
import math

import torch
from torch import Tensor

from mingpt import events
from mingpt.config import Config, TrainerConfig
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import autocast
from mingpt.model import GPT, generate
from mingpt.report.files import describe, read_records
from mingpt.resume import StartPoint

log = logging.getLogger(__name__)
MIN_BATCH_TOKENS = 4096  # without a backward pass there is room, and small batches cost more


class Evaluator:
    """Evaluates `model`; the ranks take batches in turn, and the result does not depend on their number."""

    def __init__(
        self, config: Config, context: DistributedContext, model: GPT, corpus: Corpus, dtype: torch.dtype
    ) -> None:
        self.config, self.context, self.model, self.corpus, self.dtype = config, context, model, corpus, dtype

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Mean loss in nats over every token of the split, dropout off. Collective.

        None on all ranks if a request to stop has cut it.
        """
        events.emit("evaluation_start", step=step)
        targets = len(self.corpus.val.tokens) - 1
        losses = self.context.run_with_heartbeat(self.local_losses)
        if self.context.agreed_stop:
            return None
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
            events.emit("evaluation_batch", number=number)
            if self.context.should_stop():
                break
            with autocast(device, self.dtype):
                _, loss = self.model(inputs.to(device), targets.to(device))
            losses[number] = float(loss) * targets.numel()
        self.model.train()
        return losses

    def sample(self) -> str:
        """Text from the default prompt, without the prompt; the same on the same kind of device.

        Cut short by a request to stop.
        """
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.default_prompt()
        tokens = generate(self.model, prompt, self.config.trainer.sample_tokens, seed=self.config.seed)
        kept = itertools.takewhile(lambda _: not self.context.should_stop(), tokens)
        return tokenizer.decode(list(kept))


def is_due(trainer: TrainerConfig, step: int) -> bool:
    """Whether an evaluation follows this step."""
    if step == 0:
        return trainer.eval_at_start
    return step == trainer.max_steps or step % trainer.eval_every == 0


def is_missing(config: Config, context: DistributedContext, start: StartPoint) -> bool:
    """Whether the evaluation that follows the step of the start is to be done first. Collective.

    So it is in a fresh run, and where a request to stop has cut it.
    """
    if start.snapshot is None or config.trainer.eval_only:
        return not config.trainer.eval_only and is_due(config.trainer, 0)
    manifest = start.snapshot.manifest
    step = manifest["step"]
    if step > config.trainer.max_steps or not is_due(config.trainer, step):
        return False
    if step == 0:
        return True  # its records are dropped when a run begins there again
    is_on_record = manifest["metrics"].get("val", {}).get("step") == step
    if context.rank == 0 and not is_on_record:
        records = itertools.chain(start.unwritten, read_records(start.folder.path / "metrics.jsonl"))
        try:
            is_on_record = any(record["step"] == step and "val/loss" in record for record in records)
        except OSError as error:
            log.warning("metrics.jsonl cannot be read (%s): evaluating again", describe(error))
    is_on_record = context.broadcast_object(is_on_record, 0)
    return not is_on_record
