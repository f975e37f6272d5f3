"""A step's gradient, summed in one fixed order on any number of workers: `trainer.reduction=exact`.

`naive_sum` is the definition: the gradients of a step's micro-batches are the leaves of the tree of tree.py.
`ExactReduction` computes the same bits earlier, in less memory and with fewer bytes sent:

- A worker adds the two halves of a tree node in place as soon as it has both. This takes no more additions
  than plain accumulation. After its last micro-batch the worker has one partial sum for each largest subtree
  whose micro-batches are all its own.
- A bucket is a group of parameters. If there are several ranks, a rank queues the exchange of a bucket's
  partial sums as soon as its own gradients of this bucket and of all earlier buckets are complete.

Without shared memory (mingpt/extras/shared_memory.py), each bucket is exchanged in two phases. A chunk is the
part of a vector that one rank adds up.

1. All-to-all: each rank sends chunk r of its partial sums to rank r. Rank r adds the chunks that it receives
   along the tree. The result is chunk r of the step's gradient.
2. All-gather: each rank sends its chunk to all ranks, which then hold the whole gradient. If updates are
   sharded, a rank's chunk has exactly the rows that the rank updates, and there is no second phase.

The two phases send about as many bytes as a ring all-reduce if each rank has one partial sum. A rank whose
micro-batches do not form one subtree has several partial sums, and sends more bytes.
"""

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from mingpt.base import events
from mingpt.base.rows import split_rows
from mingpt.base.system import complete
from mingpt.distributed import DistributedContext
from mingpt.distributed.transport import Reduction
from mingpt.parallel.ddp import WholeWeights, gradient_of
from mingpt.parallel.strategy import StrategySetup
from mingpt.parallel.tree import PartialSums, add_lists, add_nodes, cover, push


def naive_sum(gradients: list[Tensor], context: DistributedContext) -> Tensor:
    """Return the sum of all ranks' gradients, given a gradient for each micro-batch of this rank. Collective.

    `gradients` are in the order of the micro-batches, and rank 0 has the first micro-batches, rank 1 the next
    ones, and so on. This function defines the bits of a step's gradient. Training does not use it, because
    each rank holds all gradients at once here.
    """
    gathered = [gradient for of_rank in context.all_gather_object(gradients) for gradient in of_rank]
    leaves = [(0, number) for number in range(len(gathered))]
    return add_nodes(leaves, gathered, len(gathered), torch.add)


class Overlap:
    """Runs exchanges of gradients during the backward pass: on a CUDA GPU on a stream, else in a thread.

    An exchange begins only after the previous exchange has ended. Otherwise ranks could issue collectives in
    different orders, and deadlock.
    """

    def __init__(self, device: torch.device) -> None:
        self.jobs: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]]] = queue.SimpleQueue()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is None:
            threading.Thread(target=self.serve, daemon=True).start()

    def run(self, exchange: Callable[[], Tensor], pieces: list[list[Tensor]]) -> Future[Tensor]:
        """Begin the exchange `exchange()`, which reads `pieces`, and return a future of its result.

        `pieces` has a list of tensors for each partial sum. Do not change these tensors before the future's
        `wait` has returned. On a CUDA GPU, an error of `exchange` is raised here, and `wait` makes the
        current stream wait, not the host. On other devices, `wait` raises the error of `exchange`, if any.
        """
        if self.stream is None:
            future = Future[Tensor]()
            self.jobs.put((future, exchange))
            return future
        future = Future[Tensor](devices=[self.stream.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for piece in [piece for of_node in pieces for piece in of_node]:
                piece.record_stream(self.stream)
            future.set_result(exchange())
        return future

    def serve(self) -> None:
        while True:
            complete(*self.jobs.get())  # type: ignore[arg-type]  # torch's Future has the same methods


def make_reduction(
    micro_batches_by_rank: Sequence[range], sizes: list[int], like: Tensor, gathers: bool
) -> Reduction:
    """Return a Reduction, for `Transport.reduce`, that adds the ranks' partial sums along a binary tree.

    The tree is that of tree.py. Each partial sum is a vector, with the dtype and device of `like`. `sizes`
    has the number of elements that each rank adds up. With `gathers`, each rank gets the whole sum.
    """
    leaves = sum(map(len, micro_batches_by_rank))
    covers = [cover(numbers, leaves) for numbers in micro_batches_by_rank]
    nodes = [node for of_rank in covers for node in of_rank]
    add = functools.partial(add_nodes, nodes, leaves=leaves, add=Tensor.add_)
    return Reduction(list(map(len, covers)), sizes, like, add, gathers)


@dataclass
class Bucket:
    """Parameters whose gradients are exchanged together, and this rank's partial sums of these gradients."""

    names: list[str]
    reduction: Reduction
    partial_sums: PartialSums[list[Tensor]] = field(default_factory=list)
    missing: int = 0  # parameters whose gradient of the last micro-batch is still to come


class ExactReduction(WholeWeights):
    """A strategy that sums gradients along the binary tree of tree.py.

    From the same gradients of micro-batches, any number of workers computes a sum with the same bits.
    """

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.gradient_buckets = [self.make_bucket(names) for names in self.buckets]
        self.is_last = False  # whether the micro-batch under way is this worker's last in the step
        self.sent: list[Future[Tensor]] = []  # the sums of the buckets sent so far, in the buckets' order
        self.sums: dict[str, Tensor] = {}  # a step's gradient by parameter: the rows that this rank updates
        if self.world_size > 1:
            self.overlap = Overlap(self.context.device)
            for bucket in self.gradient_buckets:
                hook = functools.partial(self.on_grad_ready, bucket)
                for name in bucket.names:
                    self.weights[name].register_post_accumulate_grad_hook(hook)

    def make_bucket(self, names: list[str]) -> Bucket:
        """Return an empty bucket for the parameters `names`.

        Each rank adds up a chunk of the sum. If updates are sharded, that is the rows that the rank updates.
        Otherwise `split_rows` splits the sum, as a vector, into chunks.
        """
        sizes = [sum(of_rank) for of_rank in zip(*map(self.rows.numel, names), strict=True)]
        if not self.updates_are_sharded:
            sizes = [len(chunk) for chunk in split_rows(sizes[self.rank], self.world_size)]
        like, shares = self.weights[names[0]], self.setup.micro_batches_by_rank
        return Bucket(names, make_reduction(shares, sizes, like, gathers=not self.updates_are_sharded))

    def start_step(self, loss_scale: float = 1.0) -> None:
        super().start_step(loss_scale)
        self.is_last, self.sent = False, []
        for bucket in self.gradient_buckets:
            bucket.partial_sums, bucket.missing = [], len(bucket.names)

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self.is_last = number == self.my_micro_batches[-1]
        yield
        if self.is_last and self.world_size > 1:
            return  # on_grad_ready sends the gradients, and finish_step the rest
        if self.is_last:
            events.emit("reduction_start")
        for bucket in self.gradient_buckets:
            self.add_gradients(bucket, number)
        events.emit("partial_sums")

    def add_gradients(self, bucket: Bucket, number: int) -> None:
        """Move the gradients of micro-batch `number` from `grad` to the bucket's partial sums."""
        gradients = []
        for name in bucket.names:
            gradients.append(gradient_of(self.weights[name]))
            self.weights[name].grad = None
        push(bucket.partial_sums, 0, number, gradients, self.setup.micro_batches, add_lists)

    def on_grad_ready(self, bucket: Bucket, weight: Tensor) -> None:
        """Count the gradient of `weight`, in this rank's last micro-batch of a step; else do nothing.

        A bucket without missing gradients is sent, once all earlier buckets are: all ranks send buckets in
        the same order.
        """
        if self.is_last:
            bucket.missing -= 1
            unsent = self.gradient_buckets[len(self.sent) :]
            for full in itertools.takewhile(lambda other: not other.missing, unsent):
                self.send(full)

    def send(self, bucket: Bucket) -> None:
        """Add the last micro-batch's gradients, if any, to the bucket; begin to exchange it. Collective."""
        if self.my_micro_batches:
            self.add_gradients(bucket, self.my_micro_batches[-1])
        pieces = [self.split_by_rank(bucket, gradients) for _, _, gradients in bucket.partial_sums]
        bucket.partial_sums = []
        self.sent.append(self.overlap.run(functools.partial(self.exchange, bucket, pieces), pieces))

    def split_by_rank(self, bucket: Bucket, gradients: list[Tensor]) -> list[Tensor]:
        """Return a bucket's gradients as vectors: if updates are not sharded, a vector for each gradient.

        Otherwise each gradient is split into a vector per rank. All vectors for rank 0 come first, then all
        vectors for rank 1, and so on.
        """
        if not self.updates_are_sharded:
            return [gradient.flatten() for gradient in gradients]
        return [
            self.take_rows(name, gradient, rank).flatten()
            for rank in range(self.world_size)
            for name, gradient in zip(bucket.names, gradients, strict=True)
        ]

    def exchange(self, bucket: Bucket, pieces: list[list[Tensor]]) -> Tensor:
        events.emit("reduction_start")
        return self.context.transport.reduce(pieces, bucket.reduction)

    def finish_step(self) -> None:
        if self.world_size == 1:
            for bucket in self.gradient_buckets:
                ((_, _, total),) = bucket.partial_sums
                self.sums |= zip(bucket.names, total, strict=True)
                bucket.partial_sums = []
            return
        for bucket in self.gradient_buckets[len(self.sent) :]:
            self.send(bucket)  # a weight took no part in the last micro-batch, or this rank has none
        for bucket, sum_of_bucket in zip(self.gradient_buckets, self.sent, strict=True):
            pieces = self.own_rows({name: self.weights[name] for name in bucket.names})
            vectors = sum_of_bucket.wait().split([piece.numel() for piece in pieces.values()])
            for (name, piece), vector in zip(pieces.items(), vectors, strict=True):
                self.sums[name] = vector.view(piece.shape)
        self.sent = []

    def gradients(self) -> dict[str, Tensor]:
        return {name: self.sums[name] for name in self.weights}

    def finish_update(self) -> None:
        self.sums = {}
        super().finish_update()
