"""torch.compile, for as long as it does what it should; a run goes on without whatever fails, and says so in one line.

On a GPU a small model's kernels end sooner than Python can launch the next ones: there the compiled passes are replayed as CUDA graphs, once
replays are seen to have the bits of the first run.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mingpt.model import GPT

log = logging.getLogger(__name__)

GRAPHS_UP_TO = 1e12  # floating-point operations of a micro-batch: a few milliseconds of a GPU
ROUNDS = 4  # of which the first runs the kernels, the second records and the others replay

Forward = Callable[..., Any]


def import_compiler() -> None:
    """What compiling needs: it takes longer than torch itself."""
    importlib.import_module("torch._inductor.compile_fx")


def compiled(model: GPT, example: Tensor, context: Callable[[], AbstractContextManager[Any]], graphs: bool = False) -> tuple[Forward, bool]:
    """The model compiled for inputs such as the example, (B, T) tokens, under `context`, or the model itself where that fails.

    With `graphs` also as CUDA graphs, if it is small. The second value tells whether it came to that: then gradients and loss lie where the
    next call writes its own. What is made belongs to the calling thread.
    """
    ways: list[tuple[str | None, str]] = [(None, "torch.compile")]
    if graphs and example.is_cuda and model.flops_per_token() * example.numel() < GRAPHS_UP_TO:
        ways.insert(0, ("reduce-overhead", "CUDA graphs"))
    for mode, name in ways:
        try:
            import torch._inductor.config

            torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice of kernels by their timing
            forward = torch.compile(model, dynamic=False, mode=mode)
            if not repeatable(forward, model, example, context, ROUNDS if mode else 1):
                raise ArithmeticError("the same input has other gradients when it comes again")
            return forward, mode is not None
        except Exception as error:  # whatever stage of the compiler fails, the run can do without it
            log.warning("%s failed (%s: %s); going on without it", name, type(error).__name__, (str(error).splitlines() or [""])[0])
    return model, False


def repeatable(forward: Forward, model: GPT, example: Tensor, context: Callable[[], AbstractContextManager[Any]], rounds: int) -> bool:
    """Whether two inputs in turns have the same loss and gradients, bit by bit, in every round."""
    inputs = [example, (example + 1) % model.vocab_size]
    try:
        first = [gradients(forward, model, tokens, context) for tokens in inputs]
        again = ((gradients(forward, model, tokens, context), right) for _ in range(rounds - 1) for tokens, right in zip(inputs, first, strict=True))
        return all(torch.equal(one, other) for found, right in again for one, other in zip(found, right, strict=True))
    finally:
        model.zero_grad(set_to_none=True)


def gradients(forward: Forward, model: GPT, tokens: Tensor, context: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
    """Copies of the loss and of every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # of dropout
    with context():
        loss = forward(tokens, tokens)[1]
    loss.backward()
    return [loss.detach().clone(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]
