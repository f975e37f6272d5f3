"""The validation loss, over all or some of the validation split, and a sample of text.

`is_due` in start.py says after which steps training evaluates the model, and `eval_batches` in
data/windows.py says which windows (token sequences) an evaluation reads.
"""

import itertools
import logging
import math

import torch
from torch import Tensor

from mingpt.base import events
from mingpt.base.errors import UserError
from mingpt.config import Config
from mingpt.data import to_device
from mingpt.distributed.device import autocast
from mingpt.model import generate_batch
from mingpt.training.run import Run

log = logging.getLogger(__name__)
MIN_BATCH_TOKENS = 4096  # without a backward pass there is memory for so many tokens; small batches are slow


def eval_batch_size(config: Config) -> int:
    """Return the most windows (token sequences) that an evaluation computes in one forward pass."""
    return max(config.trainer.micro_batch_size, MIN_BATCH_TOKENS // config.data.block_size)


class Evaluator:
    """Evaluates the model of a run. The ranks take batches in turn."""

    def __init__(self, run: Run) -> None:
        self.config, self.context, self.corpus = run.config, run.context, run.corpus
        self.model, self.strategy = run.state.model, run.strategy

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Return {"val/loss": mean nats per token of the validation split}, on all ranks. Collective.

        The loss is computed without dropout, over all windows of the split or, if trainer.eval_windows is
        set, over at most that number of windows. If the size of the split in bytes is known, the result also
        has "val/bits_per_byte", computed with the split's mean number of bytes per token. Returns None on all
        ranks if they agree to stop; with trainer.eval_only, StopRequested is raised instead, or the process
        exits. All ranks raise UserError if a token is outside of the vocabulary. A rank that cannot read its
        token shards raises ExpectedError. `step` is only put into events.
        """
        events.emit("evaluation_start", step=step)
        by_rank = self.context.gather_on_all(self.local_sums)
        if self.context.agreed_stop:
            return None
        sums = torch.stack(by_rank).sum(0)  # exact: of each sum, all ranks but one have zero
        nats, targets = map(math.fsum, sums.tolist())
        values = {"val/loss": nats / targets}
        if self.corpus.val_bytes:
            source_bytes = targets * self.corpus.val_bytes / len(self.corpus.val.tokens)
            values["val/bits_per_byte"] = nats / math.log(2) / source_bytes
        return values

    def local_sums(self) -> Tensor:
        """Return (sum of the losses in nats, number of targets) of each batch as a column, (2, batches).

        The columns of other ranks' batches are zeros. A request to stop during training ends the loop early,
        and the remaining columns stay zero. Raises UserError if this rank reads a token outside of
        the vocabulary, ExpectedError if it cannot read token shards. Collective if weights are sharded.
        """
        batches = self.corpus.val.eval_batches(eval_batch_size(self.config), self.config.trainer.eval_windows)
        sums = torch.zeros(2, len(batches), dtype=torch.float64)
        error: UserError | None = None
        self.model.eval()
        for first in range(0, len(batches), self.context.world_size):
            number = first + self.context.rank
            events.emit("evaluation_batch", number=number)
            if self.strategy.any(self.context.should_stop() or error is not None):
                break
            if number < len(batches):
                try:
                    sums[:, number] = self.evaluate_batch(self.corpus.val.read(*batches[number]))
                    continue
                except UserError as data_error:
                    error = data_error
            if self.strategy.weights_are_sharded:  # the others' forward passes need this rank's weights
                self.evaluate_batch(torch.zeros(1, 2, dtype=torch.long))
        self.model.train()
        if error is not None:
            raise error
        return sums

    @torch.no_grad()
    def evaluate_batch(self, windows: Tensor) -> Tensor:
        """Return (sum of the losses in nats, number of targets) of `windows`, which has the shape (B, T + 1).

        The result is a float64 tensor on the CPU. Collective if weights are sharded.
        """
        device, inputs, targets = self.context.device, windows[:, :-1], windows[:, 1:]
        with autocast(device, self.context.dtype):
            _, loss = self.model(*to_device((inputs, targets), device))
        return torch.tensor([float(loss) * targets.numel(), targets.numel()], dtype=torch.float64)

    def sample(self, is_wanted: bool) -> str:
        """Return the text of `trainer.sample_tokens` tokens that the model writes after the default prompt.

        The tokens are drawn with the run's seed. A request to stop ends the text early. Returns "" if there
        is no tokenizer. If weights are sharded, all ranks must call this method, and all ranks return the
        text. Otherwise `is_wanted` says whether this rank needs the text; if not, the result is "".
        """
        tokenizer = self.corpus.tokenizer
        if tokenizer is None or not (is_wanted or self.strategy.weights_are_sharded):
            return ""
        prompt = tokenizer.default_prompt()
        count, known = self.config.trainer.sample_tokens, len(tokenizer)
        samples = generate_batch(self.model, prompt, count, [self.config.seed], vocab_size=known)
        tokens = (token for (token,) in samples if token is not None)
        kept = itertools.takewhile(lambda _: not self.strategy.any(self.context.should_stop()), tokens)
        return tokenizer.decode(list(kept))
