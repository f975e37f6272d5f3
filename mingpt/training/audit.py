"""The audit: a hash chain over the tokens that a run has trained on.

Each worker hashes the tokens of every micro-batch that it computes. Whenever a snapshot is due, the hashes of
all ranks since the last snapshot are gathered. They are chained into one hash, step by step in the order of
the micro-batches, and this hash is written to the snapshot's manifest. Until a snapshot is due, each
micro-batch takes some 200 bytes of memory. `recompute` computes the chain that a run must have; it needs
only the configuration and the data.
"""

import functools
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from mingpt.config import Config
from mingpt.data import CharDataset, ElasticSampler
from mingpt.distributed import DistributedContext

ANOTHER_RANKS = bytes(32)  # stands for the digest of a micro-batch that another rank computes
START = hashlib.sha256(b"no step yet").hexdigest()  # the chain of a run before its first step


def digest(inputs: Tensor, targets: Tensor) -> bytes:
    """Return the SHA-256, 32 bytes, of a micro-batch's inputs and targets, (B, T) int64 each on the CPU."""
    content = inputs.contiguous().numpy().tobytes() + targets.contiguous().numpy().tobytes()
    return hashlib.sha256(content).digest()


def extend(chain: str, step: bytes) -> str:
    """Return the hash chain `chain`, in hex, extended by one step.

    `step` has the digests of the step's micro-batches, joined in the order of the micro-batches.
    """
    return hashlib.sha256(bytes.fromhex(chain) + step).hexdigest()


class Audit:
    """The digests of this rank's micro-batches since the last `gather_chain`, and the chain up to that call.

    The argument `chain` is the chain in the snapshot from which the run goes on, or START in a fresh run.
    `micro_batches` is the number of micro-batches in a step, on all ranks together.
    """

    def __init__(self, chain: str, micro_batches: int) -> None:
        self.chain, self.micro_batches = chain, micro_batches
        self.current: dict[int, bytes] = {}  # micro-batch -> digest, in the step under way
        self.steps: list[dict[int, bytes]] = []  # the same of each completed step since the last gather_chain
        self.pending: Callable[[], str] = lambda: chain  # what the last gather_chain has returned

    def add(self, micro_batch: int, inputs: Tensor, targets: Tensor) -> None:
        self.current[micro_batch] = digest(inputs, targets)

    def end_step(self) -> None:
        self.steps.append(self.current)
        self.current = {}

    def gather_chain(self, context: DistributedContext) -> Callable[[], str]:
        """Begin to chain all ranks' digests up to the last completed step. Collective.

        Returns a function that waits for the other ranks and returns the chain, in hex. Any thread may call
        this function.
        """
        self.chain = self.pending()  # the previous chain, which is complete by now
        before, steps = self.chain, len(self.steps)
        digests = b"".join(
            step.get(number, ANOTHER_RANKS) for step in self.steps for number in range(self.micro_batches)
        )
        self.steps = []
        if not digests:
            return self.pending
        # A sum gathers the digests, because every entry is zero on all ranks but one.
        summed = context.transport.all_reduce_async(torch.frombuffer(bytearray(digests), dtype=torch.uint8))

        @functools.cache
        def chain() -> str:
            after = before
            for step in summed().view(steps, -1):
                after = extend(after, step.numpy().tobytes())
            return after

        self.pending = chain
        return chain


def make_sampler(
    config: Config, dataset: CharDataset, num_replicas: int = 1, rank: int = 0, takes_turns: bool = False
) -> ElasticSampler:
    """Return the sampler of the windows (token sequences) that one rank trains on, at step 0.

    `num_replicas` is the number of ranks. With `takes_turns`, the rank gets every num_replicas-th micro-batch
    of a step instead of consecutive micro-batches.
    """
    return ElasticSampler(
        dataset,
        batch_size=config.trainer.batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        seed=config.seed,
        num_replicas=num_replicas,
        rank=rank,
        takes_turns=takes_turns,
    )


def recompute(config: Config, dataset: CharDataset, steps: int) -> str:
    """Return the hash chain that a run of `config` must have after `steps` steps on the data `dataset`."""
    size, batch_size = config.trainer.micro_batch_size, config.trainer.batch_size
    sampler = make_sampler(config, dataset)
    chain = START
    for step in range(steps):
        starts = sampler.window_starts(step * batch_size, batch_size).reshape(batch_size // size, size)
        digests = [digest(*dataset.__getitems__(micro_batch.tolist())) for micro_batch in starts]
        chain = extend(chain, b"".join(digests))
    return chain
