"""torch.compile for the loss, checked before it is used; where it fails, training goes on without it.

On a GPU a small model's kernels end sooner than Python can launch the next ones. There the compiled passes
are also captured as CUDA graphs, once their replays are seen to give the bits of the first run.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from mingpt.model.gpt import GPT, Block, LossModule

log = logging.getLogger(__name__)

MAX_GRAPH_FLOPS = 4e12  # of a micro-batch: about ten milliseconds of a GPU; larger ones gain nothing
REPLAYS = 4  # calls per input: the first runs the kernels, the second captures, the others replay

Forward = Callable[[Tensor, Tensor], Tensor]
Autocast = Callable[[], AbstractContextManager[Any]]


def import_compiler() -> None:
    """Import what compiling needs, which takes longer than torch itself."""
    importlib.import_module("torch._inductor.compile_fx")


def compile_model(
    loss: LossModule, example: Tensor, autocast: Autocast, graphs: bool = False
) -> tuple[Forward | None, bool]:
    """The loss compiled for (B, T) tokens and targets of the example's shape; None where that fails.

    With `graphs`, small models on a GPU use CUDA graphs. The second value says whether they do: then the next
    call overwrites loss and gradients of this one. What is compiled belongs to the calling thread.
    """
    small = loss.model.flops_per_token() * example.numel() < MAX_GRAPH_FLOPS
    modes = [("default", "torch.compile")]
    if graphs and example.is_cuda and small:
        modes.insert(0, ("reduce-overhead", "CUDA graphs"))
    for mode, name in modes:
        try:
            import torch._inductor.config as inductor

            # Deterministic: kernels are not chosen by their timing.
            inductor.deterministic = torch.are_deterministic_algorithms_enabled()
            inductor.triton.cudagraph_or_error = mode != "default"
            forward = torch.compile(loss, dynamic=False, mode=mode)
            if mode == "default":
                gradients(forward, loss, example, autocast)
            elif not is_repeatable(forward, loss, example, autocast):
                raise ArithmeticError("the same input has other gradients when it comes again")
            return forward, mode != "default"
        except Exception as error:  # any stage of the compiler may fail; training does without it
            reason = (str(error).splitlines() or [""])[0]
            log.warning("%s failed (%s: %s); going on without it", name, type(error).__name__, reason)
    return None, False


def can_compile_block(model: GPT, x: Tensor, autocast: Autocast, dtype: torch.dtype) -> bool:
    """Whether a block like the model's can be compiled for (B, T, C) activations; fills the compiler's cache.

    `dtype` is that of its weights.
    """
    try:
        import torch._inductor.config as inductor

        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
        block = Block(model.config).to(x.device, dtype)
        x = x.to(dtype).requires_grad_()
        with autocast():
            y = torch.compile(block.compute, dynamic=False)(x, 0, model.positions)
        y.sum().backward()
    except Exception as error:  # any stage of the compiler may fail; training does without it
        reason = (str(error).splitlines() or [""])[0]
        log.warning("torch.compile failed (%s: %s); going on without it", type(error).__name__, reason)
        return False
    return True


def compile_blocks(model: GPT) -> None:
    """Compile each block by itself, since sharded weights come and go between the blocks."""
    for block in model.h:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, dynamic=False)  # type: ignore[method-assign]


def is_repeatable(forward: Forward, loss: LossModule, example: Tensor, autocast: Autocast) -> bool:
    """Whether two alternating inputs have the same loss and gradients, bit by bit, at every call."""
    generator = torch.Generator().manual_seed(0)
    shape = example.shape
    inputs = [torch.randint(0, loss.model.vocab_size, shape, generator=generator) for _ in range(2)]
    inputs = [tokens.to(example.device) for tokens in inputs]
    with random_weights(loss):
        first = [gradients(forward, loss, tokens, autocast) for tokens in inputs]
        for _ in range(REPLAYS - 1):
            for tokens, expected in zip(inputs, first, strict=True):
                again = gradients(forward, loss, tokens, autocast)
                if not all(torch.equal(one, other) for one, other in zip(again, expected, strict=True)):
                    return False
    return True


@contextmanager
def random_weights(loss: LossModule) -> Iterator[None]:
    """Replace the weights for a while: gradients of matrices that begin at zero may be zero too."""
    weights = list(loss.parameters())
    with torch.no_grad():
        saved = [weight.clone() for weight in weights]
        for weight in weights:
            weight.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, saved, strict=True):
                weight.copy_(before)


def gradients(forward: Forward, loss: LossModule, tokens: Tensor, autocast: Autocast) -> list[Tensor]:
    """Copies of the loss and of every parameter's gradient; the originals are freed, as in training."""
    torch.manual_seed(0)  # of dropout
    try:
        with autocast():
            # Targets in a tensor of their own: a compiler would rely on inputs and targets being the same
            # one.
            value = forward(tokens, tokens.roll(1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        grads = [weight.grad.clone() for weight in loss.parameters() if weight.grad is not None]
        return [value.detach().clone(), *grads]
    finally:
        loss.zero_grad(set_to_none=True)
