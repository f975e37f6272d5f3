"""torch.compile, for as long as it does what it should; a run goes on without whatever fails, and says so in one line.

On a GPU a small model's kernels end sooner than Python can launch the next ones: there the compiled passes are replayed as CUDA graphs, once
replays are seen to have the bits of the first run.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from mingpt.model import Loss

log = logging.getLogger(__name__)

GRAPHS_UP_TO = 4e12  # floating-point operations of a micro-batch: some ten milliseconds of a GPU
REPLAYS = 4  # times that each input comes: the first runs the kernels, the second records and the others replay

Forward = Callable[[Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


def import_compiler() -> None:
    """What compiling needs: it takes longer than torch itself."""
    importlib.import_module("torch._inductor.compile_fx")


def compiled(loss: Loss, example: Tensor, context: Context, graphs: bool = False) -> tuple[Forward | None, bool]:
    """The loss compiled for inputs and targets such as the example, (B, T) tokens, under `context`; None where that fails.

    With `graphs` also as CUDA graphs, if it is small. The second value tells whether it came to that: then gradients and loss lie where the
    next call writes its own. What is made belongs to the calling thread.
    """
    graphs = graphs and example.is_cuda and loss.model.flops_per_token() * example.numel() < GRAPHS_UP_TO
    for mode, name in [("reduce-overhead", "CUDA graphs")] * graphs + [("default", "torch.compile")]:
        try:
            import torch._inductor.config as inductor

            inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice of kernels by their timing
            inductor.triton.cudagraph_or_error = mode != "default"  # where graphs are not to be had, an error says so
            forward = torch.compile(loss, dynamic=False, mode=mode)
            if mode == "default":
                gradients(forward, loss, example, context)
            elif not repeatable(forward, loss, example, context):
                raise ArithmeticError("the same input has other gradients when it comes again")
            return forward, mode != "default"
        except Exception as error:  # whatever stage of the compiler fails, the run can do without it
            log.warning("%s failed (%s: %s); going on without it", name, type(error).__name__, (str(error).splitlines() or [""])[0])
    return None, False


def repeatable(forward: Forward, loss: Loss, example: Tensor, context: Context) -> bool:
    """Whether two inputs in turns have the same loss and gradients, bit by bit, however often they come."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, loss.model.vocab_size, example.shape, generator=generator).to(example.device) for _ in range(2)]
    with other_weights(loss):
        first = [gradients(forward, loss, tokens, context) for tokens in inputs]
        again = ((gradients(forward, loss, tokens, context), right) for _ in range(REPLAYS - 1) for tokens, right in zip(inputs, first, strict=True))
        return all(torch.equal(one, other) for found, right in again for one, other in zip(found, right, strict=True))


@contextmanager
def other_weights(loss: Loss) -> Iterator[None]:
    """Random weights in the place of those that there are: of matrices that begin at zero, gradients would be zero as well."""
    weights = list(loss.parameters())
    with torch.no_grad():
        kept = [weight.clone() for weight in weights]
        for weight in weights:
            weight.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def gradients(forward: Forward, loss: Loss, tokens: Tensor, context: Context) -> list[Tensor]:
    """Copies of the loss and of every parameter's gradient: the originals are gone before the next call, as in training."""
    torch.manual_seed(0)  # of dropout
    try:
        with context():
            value = forward(tokens, tokens.roll(1, 1))  # targets of their own: a compiler would count on one tensor being both
        value.backward()  # type: ignore[no-untyped-call]
        return [value.detach().clone(), *(weight.grad.clone() for weight in loss.parameters() if weight.grad is not None)]
    finally:
        loss.zero_grad(set_to_none=True)
