"""The interface between a training loop and a way of training in parallel; digests and norms of gradients.

To compute the norm of all gradients, each rank computes the norms of the rows that it holds. Then every rank
combines the norms of all rows, in the order of the tensors, however the rows are split among ranks.
torch.nn.utils.clip_grad_norm_ computes the norm of each shard, so the bits of its result may depend on the
number of workers.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.base.errors import UserError
from mingpt.base.rows import RowMap, Shape
from mingpt.distributed import DistributedContext

DIGEST_PIECE = 1 << 18  # elements
# The ratio of a piece's multipliers to those of the next piece: 2 ** 64 over the golden ratio, odd, as int64.
DIGEST_FACTOR = -7046029254386353131
DIGEST_TYPES = {1: torch.uint8, 2: torch.int16}  # by an element's bytes
Forward = Callable[..., Tensor]  # a module; the trainer's maps tokens and targets to the mean loss


@functools.cache
def digest_factors(device: torch.device) -> Tensor:
    """Return the numbers by which `digest` multiplies elements: DIGEST_PIECE odd pseudo-random int64 numbers.

    The numbers are drawn with a fixed seed, so they are the same on all ranks.
    """
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (DIGEST_PIECE,), generator=generator) | 1).to(device)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return a digest of the tensor's bits, an int64 scalar on the same device.

    The elements are read as integers of up to 32 bits. Each integer is multiplied by a fixed number, and the
    digest is the sum of these products modulo 2 ** 64. The fixed numbers are odd, so a change of a single
    integer changes the digest. The fixed numbers are pseudo-random, so changes of several integers cancel out
    only with a probability of about 2 ** -32. Only the first call for a GPU waits for the GPU.
    """
    bits = tensor.detach().reshape(-1).view(DIGEST_TYPES.get(tensor.element_size(), torch.int32))
    first, *pieces = bits.split(DIGEST_PIECE)
    total = first.to(torch.int64, copy=True)
    for piece in pieces:  # DIGEST_PIECE bounds the memory for 64-bit integers
        part = total[: len(piece)]
        torch.add(piece, part, alpha=DIGEST_FACTOR, out=part)
    return total.mul_(digest_factors(tensor.device)[: len(total)]).sum()


def row_norms(gradient: Tensor) -> Tensor:
    """Return the norm of each row, a slice along dimension 0. The rows of a vector are its elements.

    A tensor without dimensions is one row.
    """
    if gradient.ndim < 2:
        return gradient.abs().reshape(-1)
    return torch.linalg.vector_norm(gradient.flatten(1), dim=1)


def total_norm(norms: Tensor) -> Tensor:
    """Return the norm of a gradient, a float32 scalar, given the norms of its rows, (rows,)."""
    wide = norms.clone() if norms.is_mps else norms.double()  # Apple's GPU has no float64
    return wide.square_().sum().sqrt_().float()


class RowGatherer:
    """Gathers norms of rows. `rows` says how the rows of the tensors `names` are split among ranks.

    A tensor that is not split has the same gradient on all ranks, and counts once.

    `all_gather(vector, length)` is a collective: it returns the vectors of all ranks, padded to `length`, as
    (workers, length).
    """

    def __init__(
        self, rows: RowMap, names: Collection[str], all_gather: Callable[[Tensor, int], Tensor]
    ) -> None:
        self.all_gather = all_gather
        by_rank = [[len(rows.of(name, rank)) for name in names] for rank in range(rows.workers)]
        self.length = max(map(sum, by_rank))
        places = torch.arange(rows.workers * self.length).split(self.length)  # of the norms when gathered
        parts = [row[: sum(part)].split(part) for row, part in zip(places, by_rank, strict=True)]
        by_tensor = zip(names, zip(*parts, strict=True), strict=True)
        counted = [held if rows.by_rank(name) else held[:1] for name, held in by_tensor]
        self.order = torch.cat([part for held in counted for part in held])

    def gather(self, norms: Tensor) -> Tensor:
        """Return all rows' norms, tensor by tensor; `norms` has those of this rank's rows. Collective."""
        self.order = self.order.to(norms.device)
        return self.all_gather(norms, self.length).flatten()[self.order]


def clip(gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `gradients`, of the finite norm `norm`, in place to a norm of at most `max_norm`; 0: no limit."""
    if not max_norm:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if norm.is_cuda:  # without waiting for the GPU
        torch._foreach_mul_(list(gradients.values()), factor)
    elif float(factor) < 1.0:
        torch._foreach_mul_(list(gradients.values()), float(factor))


@dataclass(frozen=True)
class StrategySetup:
    """The model and the settings from which a strategy is built."""

    model: nn.Module  # on the meta device, or on its final device
    micro_batches_by_rank: Sequence[range]  # numbers, in a step, of the micro-batches that each rank computes
    context: DistributedContext
    blocks: Sequence[nn.Module] = ()  # parts of the model; sharded weights are gathered a block at a time
    dummy: Sequence[Tensor] = ()  # inputs of a forward pass that is not counted; ExactReduction needs none
    shard_optimizer: bool = False  # whether a rank that holds all weights updates only its rows
    reshard: bool = True  # whether sharded weights are freed after a block's forward pass
    param_dtype: torch.dtype | None = None  # of sharded weights once gathered; None: the dtype that they have
    timeout_s: float = 60.0  # of a collective, in seconds
    autocasts: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around a forward pass

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step, of all ranks together."""
        return sum(map(len, self.micro_batches_by_rank))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by uninitialised tensors on `device`. Tied weights stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            if tensor.is_meta and tensor not in made:
                made[tensor] = empty_like(tensor, device)
            if tensor.is_meta:
                setattr(module, name, made[tensor])


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, or parameter, like `tensor` on `device`.

    For a meta tensor torch.empty_like would import sympy, which takes a fifth of torch's import time.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        empty = torch.empty_like(tensor, device=device)  # a DTensor of FSDP2, which has more than a shape
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class Strategy(ABC):
    """A way of training in parallel. Each rank constructs its own Strategy.

    The constructor allocates the weights and buffers that are on the meta device. The caller sets these, then
    calls `prepare` once. One step is

        strategy.start_step(loss_scale)
        for micro_batch in strategy.my_micro_batches:
            with strategy.micro_batch(micro_batch):
                loss = ... of strategy.forward(...), a mean over the micro-batch
                (loss * strategy.loss_factor).backward()
        strategy.finish_step()
        strategy.clip_grad_norm_(max_norm)
        ... update strategy.pieces() from strategy.gradients(), which are means over all micro-batches ...
        strategy.finish_update()

    All ranks do all of this together. A piece is the rows of a parameter that this rank updates: all rows,
    unless updates are sharded. A frozen parameter, one without `requires_grad`, has no piece and no gradient.
    If a parameter takes no part in a micro-batch, its gradient of this micro-batch is zeros (with FSDP2: from
    torch 2.13 on). The constructor raises UserError for a model that it cannot train, such as a frozen one.
    """

    takes_turns = False  # if so, rank r has micro-batches r, r + workers, ... instead of consecutive ones
    weights_are_sharded = False  # if so, every forward pass is collective
    updates_are_sharded = False  # whether gradients and the optimizer's state are sharded
    forward: Forward

    def __init__(self, setup: StrategySetup) -> None:
        self.setup, self.context = setup, setup.context
        self.rank, self.world_size = setup.context.rank, setup.context.world_size
        weights = dict(setup.model.named_parameters())
        self.trained = [name for name, weight in weights.items() if weight.requires_grad]
        if not self.trained:
            raise UserError("all parameters of the model are frozen: set requires_grad of at least one")
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.my_micro_batches = setup.micro_batches_by_rank[self.rank]
        self.loss_weight = 1.0 / setup.micro_batches  # of each micro-batch in the step's mean loss
        self.loss_scale = 1.0

    @functools.cached_property
    def rows(self) -> RowMap:
        """A map from a parameter's name to the rows that each rank updates."""
        return RowMap(self.shapes, self.world_size, ("",) if self.updates_are_sharded else ())

    @functools.cached_property
    def row_gatherer(self) -> RowGatherer:
        return RowGatherer(self.rows, self.trained, self.context.transport.all_gather)

    def state_rows(self, shapes: Mapping[str, Shape]) -> RowMap:
        """Return a map from a tensor's name, "model.*" or "optimizer.*", to the rows that each rank holds.

        `shapes` has the shapes of the unsharded tensors, by name.
        """
        held = {"model.": self.weights_are_sharded, "optimizer.": self.updates_are_sharded}
        return RowMap(shapes, self.world_size, tuple(kind for kind in held if held[kind]))

    def prepare(self, forward: Forward) -> None:
        """Set `forward`, the module to train. Afterwards call it as `strategy.forward`. Collective."""
        self.forward = forward

    @abstractmethod
    def pieces(self) -> dict[str, Tensor]:
        """Return, by name, the rows of parameters that this rank updates, in the parameters' own memory."""

    def held_weights(self) -> dict[str, Tensor]:
        """Return, by name, all rows of parameters that this rank holds, in the parameters' own memory."""
        return self.pieces()

    def start_step(self, loss_scale: float = 1.0) -> None:
        """Begin a step. `finish_update` must have freed the gradients of the previous step.

        `loss_scale` is a power of two, and 1 except for float16. It is part of `loss_factor`, by which the
        loop multiplies the loss. `clip_grad_norm_` divides the gradients by `loss_scale`.
        """
        self.loss_scale = loss_scale

    @property
    def loss_factor(self) -> float:
        """The factor by which the loop multiplies a micro-batch's loss.

        After `finish_step`, the gradients are then means over the step's micro-batches, times the loss scale.
        """
        return self.loss_weight * self.loss_scale

    @abstractmethod
    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of micro-batch `number`.

        The caller enters one such context for each of `my_micro_batches`, in order.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """Complete the gradients of the step. Call this after the last micro-batch. Collective.

        If an exchange of gradients fails, a backward pass or this method raises the error, often that of a
        lost peer; on a GPU, perhaps neither does.
        """

    @abstractmethod
    def unreduced(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context for a backward pass whose gradients do not count.

        Enter the context after `start_step`, before the first micro-batch. The value of the context is a
        dictionary, which in the end has the `digest` of each gradient before its reduction.
        The keys name the parameters or, if parts of the model are reduced as a whole, these parts. Collective
        if weights are sharded.
        """

    def digests(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the gradients' digests for the loss `forward(*inputs)`, as `unreduced` gives them.

        Collective if weights are sharded.
        """
        with self.unreduced() as found:
            with self.setup.autocasts():
                loss = self.forward(*inputs)
            loss.mul(self.loss_factor).backward()  # type: ignore[no-untyped-call]
        return found

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the pieces, by name. Call this after `finish_step`."""

    @abstractmethod
    def finish_update(self) -> None:
        """Free the gradients; if each rank holds all weights, also give all ranks the new weights.

        Call this after the pieces were updated. Collective.
        """

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Divide gradients by the loss scale, then scale them, if finite, to a norm of at most `max_norm`.

        Returns the norm before the second operation, a scalar. A `max_norm` of 0 is no limit. The norms of
        all rows are combined in the order of the parameters, however ranks split the rows. Collective.
        """
        gradients = self.gradients()
        if self.loss_scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), 1.0 / self.loss_scale)
        norms = torch.cat([row_norms(gradient) for gradient in gradients.values()])
        if self.updates_are_sharded:
            norms = self.row_gatherer.gather(norms)
        norm = total_norm(norms)
        clip(gradients, norm, max_norm)
        return norm

    def any(self, flag: bool) -> bool:
        """If forward passes are collective, return whether `flag` is true on any rank; else return `flag`.

        With this method, ranks leave a loop of collective forward passes in the same iteration. Collective if
        forward passes are.
        """
        return flag

    def take_rows(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """Return a view of the rows that `rank` updates; `tensor` has the shape of the parameter `name`."""
        rows = self.rows.of(name, rank)
        return tensor[rows.start : rows.stop] if tensor.ndim else tensor

    def dummy_backward(self) -> None:
        """Run a pass whose gradients are zeros, because other ranks' passes need this rank. Collective."""
        with self.setup.autocasts():
            outputs = self.forward(*self.setup.dummy)
        outputs.sum().mul(0.0).backward()  # type: ignore[no-untyped-call]


# {(trainer.parallel, trainer.reduction): class of the strategy}; parallel/__init__.py fills it.
STRATEGIES: dict[tuple[str, str], type[Strategy]] = {}
