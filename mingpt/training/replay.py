"""Replay: a check that all workers compute alike. The workers compare copies of the state, and gradients.

With deterministic kernels, workers with processors of one kind compute the same bits. So if two results
differ, at least one result is wrong: a core, a GPU or its memory has failed without an error. On GPUs only
trainer.reduction=exact makes torch use deterministic kernels; with fast, gradients are not compared there. If
the processors are of different kinds, or environment variables choose different kernels, nothing is compared.

A replay is made before a step. First the workers compare their copies of the weights and of the optimizer's
state, unless these are sharded. If the copies are equal, each worker computes gradients of two micro-batches:
its own first one in the step, or number 0 if it has none, and the next worker's; a single worker repeats its
own. The workers compare digests (hashes) of these gradients, which are not summed.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from mingpt.base.errors import NonRetryableError, UserError
from mingpt.data import mix, to_device
from mingpt.parallel import digest
from mingpt.report import RunLogger
from mingpt.training.run import Run
from mingpt.training.saving import Saving

Digests = dict[str, int]  # by the tensor's name
log = logging.getLogger(__name__)


def minority(values: Sequence[object]) -> list[int]:
    """Return the ranks whose value differs from the most common value.

    `values` has one value for each rank, in the order of the ranks. Returns an empty list if all values are
    equal. Returns all ranks if two values are equally common and no value is more common.
    """
    (common, count), *others = Counter(values).most_common()
    has_most = not others or count > others[0][1]
    return [rank for rank, value in enumerate(values) if not has_most or value != common]


def first_difference(digests: Sequence[Digests]) -> str:
    """Return the name of the first tensor whose digests differ between ranks.

    Call this only if the digests of at least one tensor differ.
    """
    return next(name for name in digests[0] if len({one[name] for one in digests}) > 1)


def fetch(*found: Mapping[str, torch.Tensor]) -> list[Digests]:
    """Return the mappings `found` with numbers in place of scalar tensors; wait for the device only once."""
    values = iter(torch.stack([scalar for one in found for scalar in one.values()]).tolist())
    return [{name: next(values) for name in one} for one in found]


class Replay:
    """Compares what all workers hold and compute (a replay), before some steps up to the next restart.

    Construct it on all ranks, then call `check` on all ranks before each step.
    """

    def __init__(self, run: Run, saving: Saving, run_logger: RunLogger | None) -> None:
        self.config, self.context, self.state, self.saving = run.config, run.context, run.state, saving
        self.sampler, self.dataset, self.strategy = run.sampler, run.corpus.train, run.strategy
        self.environment, self.run_logger = run.environment, run_logger
        self.first_step = run.start.step
        # The first micro-batch of each rank, by rank; 0 for a rank without a micro-batch of its own.
        self.numbers = [share.start if share else 0 for share in self.strategy.setup.micro_batches_by_rank]
        every = run.config.trainer.replay_every
        self.every = every if every and self.are_alike() else 0

    def are_alike(self) -> bool:
        """Return whether all workers have processors of one kind and choose the same kernels. Collective.

        If they do not, rank 0 logs that the workers are not compared.
        """
        flags = {
            name: value
            for name, value in torch.cpu.get_capabilities().items()
            if isinstance(value, (bool, str))
        }
        kinds = self.context.all_gather_object((self.environment.device, flags, self.environment.kernels))
        are_alike = kinds.count(kinds[0]) == len(kinds)
        if not are_alike and self.context.rank == 0:
            log.warning(
                "the workers have different processors, or different variables that choose kernels: what "
                "they compute is not compared"
            )
        return are_alike

    def is_due(self) -> bool:
        """Return whether a replay is due before the coming step.

        A replay is due before a generation's first step and before the run's last step. A replay is also due
        if the number of completed steps is a multiple of trainer.replay_every. If that setting is 0, or
        unless `are_alike`, a replay is never due.
        """
        every, step = self.every, self.state.step
        is_end = step in (self.first_step, self.config.trainer.max_steps - 1)
        return every > 0 and (is_end or step % every == 0)

    def check(self) -> None:
        """If a replay is due before this step, compare the workers' copies and gradients. Collective.

        If copies or gradients differ, the snapshots newer than `Saving.replayed_step`, the last step at which
        the workers count as alike, are set aside (renamed). Then all ranks raise NonRetryableError. But if a
        rank cannot rename a snapshot, it raises OSError or an error of fsspec's driver, and the others lose a
        peer. A rank that cannot read its token shards raises ExpectedError.
        """
        if not self.is_due():
            return
        what = self.compare_copies() or self.compare_gradients()
        if what:
            self.end_job(*what)
        self.saving.replayed_step = self.state.step

    def compare_copies(self) -> tuple[list[int], str] | None:
        """Compare the ranks' copies of the weights and of the optimizer's state. Collective.

        Sharded tensors are not compared. Returns (ranks that may be wrong, end of a message about these
        ranks). Returns None if all copies are equal, or if there is nothing to compare.
        """
        shared = [] if self.strategy.weights_are_sharded else ["model."]
        shared += [] if self.strategy.updates_are_sharded else ["optimizer."]
        if not shared or self.context.world_size == 1:
            return None
        parts = self.state.tensors().items()
        (own,) = fetch({name: digest(part) for name, part in parts if name.startswith(tuple(shared))})
        digests = self.context.all_gather_object(own)
        named = minority([tuple(one.values()) for one in digests])
        return (named, f"holds a different copy of {first_difference(digests)}") if named else None

    def compare_gradients(self) -> tuple[list[int], str] | None:
        """Compute each rank's first micro-batch twice, on two ranks if possible, and compare. Collective.

        Returns (ranks that may be wrong, end of a message about these ranks). Returns None if the gradients
        are equal, if a rank's data raise UserError, or if trainer.reduction is fast and the ranks use GPUs.
        Raises ExpectedError if token shards cannot be read.
        """
        if self.config.trainer.reduction == "fast" and self.context.device.type != "cpu":
            return None  # a GPU's fast kernels compute other bits each time
        rank, workers = self.context.rank, self.context.world_size
        mine, others = self.numbers[rank], self.numbers[(rank + 1) % workers]
        if any(self.context.all_gather_object(not self.can_read(mine, others))):
            return None  # the step itself reports it if a rank cannot read its own micro-batches
        results = self.context.all_gather_object(fetch(self.digests(mine), self.digests(others)))
        named, ends = set[int](), []
        for owner in range(workers):
            checker, number = (owner - 1) % workers, self.numbers[owner]
            owned, checked = results[owner][0], results[checker][1]
            if owned == checked:
                continue
            again = self.context.all_gather_object(*fetch(self.digests(number)))
            named |= {*minority([tuple(one.values()) for one in again])}
            named |= {rank for rank, first in ((owner, owned), (checker, checked)) if again[rank] != first}
            ends.append(f"computed a different gradient of micro-batch {number}")
        return (sorted(named), ends[0]) if named else None

    def can_read(self, *numbers: int) -> bool:
        """Return whether this rank can read these micro-batches of the coming step without a UserError."""
        try:
            for number in numbers:
                self.read(number)
        except UserError:
            return False
        return True

    def read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return micro-batch `number` of the coming step: inputs and targets, (B, T) each, on the device.

        Raises UserError if a token is outside of the vocabulary, ExpectedError if token shards cannot be
        read.
        """
        size = self.config.trainer.micro_batch_size
        starts = self.sampler.window_starts(self.state.windows_seen + number * size, size)
        inputs, targets = to_device(self.dataset.__getitems__(starts.tolist()), self.context.device)
        return inputs, targets

    def digests(self, number: int) -> dict[str, torch.Tensor]:
        """Compute the gradients of micro-batch `number` on this rank; return {name: digest (hash)}.

        The gradients are those before any sum over ranks. A digest is a scalar tensor. The name is a
        parameter's; under fsdp with several workers, it is "the model" or a block such as "block 3", whose
        gradients have one digest. Raises the errors of `read`. Collective if weights are sharded.
        """
        inputs, targets = self.read(number)
        if self.config.model.dropout:
            torch.manual_seed(mix(self.config.seed, self.state.step, number))
        return self.strategy.digests(inputs, targets)

    def end_job(self, ranks: list[int], what: str) -> NoReturn:
        """Set aside the snapshots newer than the step `Saving.replayed_step`, and end the job. Collective.

        Raises NonRetryableError, unless `Saving.set_aside_after` raises an error on this rank. `ranks` are
        the ranks that may be wrong. The message names their workers, followed by `what`, which says why they
        may be wrong.
        """
        context, agreed_step, run_logger = self.context, self.saving.replayed_step, self.run_logger
        device, places = self.environment.device, context.places  # devices of one kind: `are_alike`
        workers = [f"worker {rank} on {places[rank].host} ({device})" for rank in ranks]
        sentence = (
            f"step {self.state.step + 1}: {' or '.join(workers)} {what}: its update is not made, and what "
            f"was saved after step {agreed_step} is not used"
        )
        if run_logger:
            next_generation = self.saving.start.generation + 1
            run_logger.history.note_distrusted(self.state.step, agreed_step, next_generation, workers)
        durable_step = self.saving.set_aside_after(agreed_step)
        if run_logger:
            run_logger.history.note_durable(durable_step)
            run_logger.failed(self.state.step, sentence)
        context.all_gather_object(None)  # wait until all ranks have set their snapshots aside
        raise NonRetryableError(sentence)
