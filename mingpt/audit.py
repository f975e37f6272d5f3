"""What the workers were really fed, as a chain of hashes that anybody can compute again from the configuration and the text.

Each worker hashes the tokens of every micro-batch it computes. Whenever a snapshot is due, the hashes of all workers since the last one
are gathered and linked, step by step and in the order of the micro-batches, into one digest that the manifest carries.
"""

import functools
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from mingpt.cluster import Cluster
from mingpt.config import Config
from mingpt.data import CharDataset
from mingpt.sampler import ElasticSampler

NOBODYS = bytes(32)
START = hashlib.sha256(b"no step yet").hexdigest()


def digest(inputs: Tensor, targets: Tensor) -> bytes:
    """SHA-256 of a micro-batch's tokens, (B, T) int64 each on the CPU."""
    return hashlib.sha256(inputs.contiguous().numpy().tobytes() + targets.contiguous().numpy().tobytes()).digest()


def link(chain: str, step: bytes) -> str:
    """The chain after one more step, whose micro-batches have these digests, one after the other."""
    return hashlib.sha256(bytes.fromhex(chain) + step).hexdigest()


class Audit:
    """One worker's hashes since the last snapshot, and the chain up to it."""

    def __init__(self, chain: str, micro_batches: int) -> None:
        self.chain, self.micro_batches = chain, micro_batches
        self.steps: list[dict[int, bytes]] = []
        self.pending: Callable[[], str] = lambda: chain

    def gather(self, cluster: Cluster) -> Callable[[], str]:
        """The chain up to now, from a function that any thread may call. Every worker must gather at the same step; nobody waits here."""
        self.chain = self.pending()  # of the last time, and so long there
        before, steps = self.chain, len(self.steps)
        mine = b"".join(step.get(number, NOBODYS) for step in self.steps for number in range(self.micro_batches))
        self.steps = []
        if not mine:
            return self.pending
        summed = cluster.begin_sum(torch.frombuffer(bytearray(mine), dtype=torch.uint8))  # each entry is one worker's, zero elsewhere

        @functools.cache
        def chain() -> str:
            after = before
            for step in summed().view(steps, -1):
                after = link(after, step.numpy().tobytes())
            return after

        self.pending = chain
        return chain


def recompute(config: Config, dataset: CharDataset, steps: int) -> str:
    """The chain that a run of this configuration over this text must carry after so many steps."""
    size, count = config.trainer.micro_batch_size, config.trainer.batch_size // config.trainer.micro_batch_size
    sampler = ElasticSampler(dataset, batch_size=config.trainer.batch_size, micro_batch_size=size, seed=config.seed)
    chain = START
    for step in range(steps):
        starts = sampler.deal(step * config.trainer.batch_size, config.trainer.batch_size).reshape(count, size)
        chain = link(chain, b"".join(digest(*dataset.__getitems__(micro_batch.tolist())) for micro_batch in starts))
    return chain


def each_window_once(config: Config, dataset: CharDataset, epochs: int) -> bool:
    """Whether each of the first epochs deals windows that lie end to end and are all different."""
    sampler = ElasticSampler(dataset, batch_size=config.trainer.batch_size, micro_batch_size=config.trainer.micro_batch_size, seed=config.seed)
    count = sampler.windows_per_epoch
    for epoch in range(epochs):
        starts = sorted(sampler.deal(epoch * count, count).tolist())
        if starts != list(range(starts[0], starts[0] + count * dataset.block_size, dataset.block_size)) or not 0 <= starts[0] < sampler.offsets:
            return False
    return True
