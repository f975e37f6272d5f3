"""Decide whether a model is compiled; compile its loss module, and try the compiled module before use.

With trainer.compile=auto and trainer.recompute=none, a new run is compiled if compiling should save at least
twice the time of the first compilation. These times are estimated from the planned FLOPs and the rates in
COSTS, not measured. So the choice is the same for any number of workers, and on all machines with the same
type of device. A resumed run with trainer.compile=auto stays compiled, or not compiled, as it was when its
snapshot was computed.

The compiler is torch.compile. If torch.compile fails, the model is trained without it. On a GPU, the kernels
of a small model end sooner than Python can launch the next kernels. If the caller allows CUDA graphs, a small
model's forward and backward passes are also captured as CUDA graphs. The graphs are used if their replays
give the same bits as the first call.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.config import Config
from mingpt.model.gpt import GPT, Block, LossModule

PAID_BACK = 2  # auto compiles if that saves twice its time, because a run may stop early or compile again
MAX_GRAPH_FLOPS = 4e12  # per micro-batch, about 10 ms of a GPU: a larger micro-batch gains nothing
REPLAYS = 4  # calls per input: the first runs the kernels, the second captures them, the others replay

Forward = Callable[[Tensor, Tensor], Tensor]
Autocast = Callable[[], AbstractContextManager[Any]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costs:
    """The speed, the saving and the compile times that `choose_compile` assumes for a kind of device."""

    flops_per_s: float  # assumed for a whole job, whatever its number of workers; without the compiler
    saved_share: float  # 1 - time of a compiled step / time of a step that is not compiled
    start_s: float  # time of the first compilation (nothing is cached), except for the blocks
    block_s: float  # additional time of the first compilation for each block


# cpu: measured on a core of an Intel Xeon with AMX, in bfloat16, with torch 2.13. The core reached
# 0.12 TFLOP/s with the default run and with nanoGPT's CPU size, and 0.3 with 10.65 M parameters. The compiler
# saved 0.50, 0.39 and 0.25 of a micro-batch's time, and took 22 s for 2 blocks and 25 s for 4. `flops_per_s`
# is nearly the rate of two such cores at the best of these rates, and `saved_share` is a little less than
# the smallest of these shares. The program that measured them was compile_cost.py of commit 496a4e0.
# cuda: estimates, not measured.
COSTS = {
    "cpu": Costs(flops_per_s=5e11, saved_share=0.2, start_s=20.0, block_s=2.0),
    "cuda": Costs(flops_per_s=2e14, saved_share=0.25, start_s=40.0, block_s=2.0),
}


@dataclass(frozen=True)
class CompileChoice:
    """Whether the model is to be compiled, and the reason in words."""

    is_compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{'compiled' if self.is_compiled else 'not compiled'}: {self.reason}"


def choose_compile(
    config: Config, flops_per_token: float, device_type: str, recorded: bool | None = None
) -> CompileChoice:
    """Return whether the model is to be compiled, as trainer.compile says, and why.

    `flops_per_token` counts a forward and backward pass; `device_type` is "cpu", "cuda" or "mps". `recorded`
    says whether a compiled model computed the snapshot from which the run resumes; None means that the run
    has trained nothing yet. trainer.compile=auto keeps `recorded`. Raises UserError if trainer.compile is
    auto, `recorded` is true, and trainer.recompute is not "none".
    """
    trainer = config.trainer
    if trainer.compile != "auto":
        return CompileChoice(trainer.compile, f"trainer.compile={str(trainer.compile).lower()}")
    if recorded and trainer.recompute != "none":
        raise UserError(
            "the snapshot was computed by a compiled model, and trainer.recompute="
            f"{trainer.recompute} does not go with that: set it back to none, or go on without the compiler "
            "by trainer.compile=false snapshot.resume=changed"
        )
    if recorded is not None:
        return CompileChoice(recorded, "trainer.compile=auto goes on as the snapshot was computed")
    if trainer.recompute != "none":
        return CompileChoice(False, f"trainer.recompute={trainer.recompute} does not go with it")
    if device_type not in COSTS:
        return CompileChoice(False, f"trainer.compile=auto has no estimate for {device_type}")
    costs, block_size = COSTS[device_type], config.data.block_size
    flops = flops_per_token * block_size * trainer.batch_size * trainer.max_steps
    saved_s = costs.saved_share * (flops / costs.flops_per_s)
    compile_s = costs.start_s + costs.block_s * config.model.n_layer
    return CompileChoice(
        saved_s >= PAID_BACK * compile_s,
        f"on a fast machine, compiling would take about {compile_s:,.0f} s and save about {saved_s:,.0f} s",
    )


def import_compiler() -> None:
    """Import torch.compile's compiler now, so that a later compilation starts sooner.

    Importing the compiler takes longer than importing torch.
    """
    importlib.import_module("torch._inductor.compile_fx")


def compile_model(
    loss: LossModule, example: Tensor, autocast: Autocast, graphs: bool = False
) -> tuple[Forward | None, bool]:
    """Compile the module `loss` for tokens and targets of the shape of `example`, (B, T), and try the result.

    Returns the compiled module (None if compiling fails) and whether it uses CUDA graphs. `graphs` allows
    CUDA graphs, for a small model on a GPU. With CUDA graphs each call overwrites the loss and the gradients
    of the previous call. Call the compiled module in the thread that compiled it. A failure is logged. The
    trial seeds torch with 0 and sets all gradients to None. `autocast()` is the context of a forward pass.
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
            log.warning(f"{name} failed ({reason_of(error)}); going on without it")
    return None, False


def can_compile_block(model: GPT, x: Tensor, autocast: Autocast, dtype: torch.dtype) -> bool:
    """Compile a new block, like the blocks of `model`, for (B, T, C) activations `x`.

    Returns whether compiling succeeds. A failure is logged. Success fills the compiler's cache. `dtype` is
    the type of the block's weights; only the shape and device of `x` matter, and `x` may get a gradient.
    `autocast()` is the context of a forward pass.
    """
    try:
        import torch._inductor.config as inductor

        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
        block = model.make_block(model.config).to(x.device, dtype)
        x = x.to(dtype).requires_grad_()
        with autocast():
            y = torch.compile(block.compute, dynamic=False)(x, model.positions)
        y.sum().backward()
    except Exception as error:  # any stage of the compiler may fail; training does without it
        log.warning(f"torch.compile failed ({reason_of(error)}); going on without it")
        return False
    return True


def compile_blocks(model: GPT) -> None:
    """Make torch.compile compile each block by itself, at its first call.

    The whole model cannot be compiled at once, because FSDP2 gathers weights between the blocks.
    """
    for block in model.h:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, dynamic=False)  # type: ignore[method-assign]


def is_repeatable(forward: Forward, loss: LossModule, example: Tensor, autocast: Autocast) -> bool:
    """Return whether later calls of `forward` give the bits of the first call with the same input.

    The loss and the gradients are compared. `forward` is `loss`, compiled. It is called in turn with two
    random inputs of the shape of `example`. The weights are random during the calls, and then restored. Seeds
    torch with 0, and sets all gradients to None. `autocast()` is the context of a forward pass.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randint(0, loss.model.vocab_size, example.shape, generator=generator).to(example.device)
        for _ in range(2)
    ]
    with random_weights(loss):
        first = [gradients(forward, loss, tokens, autocast) for tokens in inputs]
        for _ in range(REPLAYS - 1):
            for tokens, expected in zip(inputs, first, strict=True):
                again = gradients(forward, loss, tokens, autocast)
                if not all(map(torch.equal, again, expected)):
                    return False
    return True


@contextmanager
def random_weights(loss: LossModule) -> Iterator[None]:
    """Make the weights random within a `with` block, and restore them at its end.

    Initial weights that are zero can make gradients zero. Such gradients are equal in all calls, even if the
    compiled module does not repeat its results.
    """
    with torch.no_grad():
        saved = [(weight, weight.clone()) for weight in loss.parameters()]
        for weight, _ in saved:
            weight.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in saved:
                weight.copy_(before)


def gradients(forward: Forward, loss: LossModule, tokens: Tensor, autocast: Autocast) -> list[Tensor]:
    """Return copies of the loss and of the gradients of all parameters.

    The inputs are `tokens`, (B, T); the targets are the same tokens in another order. First torch is seeded
    with 0, and at the end the `grad` of all parameters is set to None. `autocast()` is the context of the
    forward pass.
    """
    torch.manual_seed(0)  # so that dropout is the same in each call
    try:
        with autocast():
            # Targets have a tensor of their own: otherwise a compiler would rely on inputs and targets being
            # the same tensor.
            value = forward(tokens, tokens.roll(1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        grads = [weight.grad.clone() for weight in loss.parameters() if weight.grad is not None]
        return [value.detach().clone(), *grads]
    finally:
        loss.zero_grad(set_to_none=True)
