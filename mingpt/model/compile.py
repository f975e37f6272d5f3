"""Decide whether the blocks of a model are compiled, and first try the compiler on one block.

The compiler is torch.compile. Each block is compiled by itself, under DDP and FSDP alike, because FSDP2
gathers weights between the blocks. All blocks have the same code, which is compiled once. If the trial fails,
or the compiled block computes something else than the block itself, no block is compiled.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.config import Config
from mingpt.model.gpt import GPT, Block


class Compiling(NamedTuple):
    """How many FLOPs a new run must plan for trainer.compile=auto to compile it, and the measured saving.

    `saved` is the share of a step's time that compiling saves, in words; "" if that was not measured.
    """

    fewest_flops: float
    saved: str = ""


# What trainer.compile=auto goes by, for a kind of device, or for one and a dtype of products. The choice is
# therefore the same for any number of workers, and on all machines with the same kind of device.
# cpu, bfloat16: measured on two cores of an Intel Xeon with AMX, torch 2.13. The first compiling takes 37 s.
# It saves twice that in runs of 2e13 FLOPs at the default size and at nanoGPT's CPU size, and of 1.7e14 at
# 10.65 M parameters. On an EPYC it saves 5 to 30 %.
# cpu, float32: measured on two cores of an EPYC; compiling took 6 to 17 s, and saves twice that in runs of
# 4e12 to 6e13 FLOPs.
# cuda: an estimate, not measured.
COMPILING = {
    "cpu": Compiling(1.5e14),
    "cpu bfloat16": Compiling(1.5e14, "5 to 40 %"),
    "cpu float32": Compiling(6e13, "3 to 16 %"),
    "cuda": Compiling(1e17),
}
MAX_DIFFERENCE = 0.1  # of a compiled block's results from the block's own; bfloat16 rounds by less than 0.01

Autocast = Callable[[], AbstractContextManager[Any]]
log = logging.getLogger(__name__)


def choose_compile(
    config: Config, flops_per_token: float, device_type: str, dtype: str, recorded: bool | None = None
) -> tuple[bool, str]:
    """Return whether the model is to be compiled, as trainer.compile says, and the reason in words.

    `flops_per_token` counts a forward and backward pass; `device_type` is "cpu", "cuda" or "mps", and `dtype`
    that of matrix products. `recorded` says whether a compiled model computed the snapshot from which the run
    resumes; None means that the run has trained nothing yet. trainer.compile=auto keeps `recorded`. Raises
    UserError if trainer.compile is auto, `recorded` is true, and trainer.recompute is not "none".
    """
    trainer = config.trainer
    if trainer.compile != "auto":
        return trainer.compile, f"trainer.compile={str(trainer.compile).lower()}"
    if recorded and trainer.recompute != "none":
        raise UserError(
            "the snapshot was computed by a compiled model, and trainer.recompute="
            f"{trainer.recompute} does not go with that: set it back to none, or go on without the compiler "
            "by trainer.compile=false snapshot.resume=changed"
        )
    if recorded is not None:
        return recorded, "trainer.compile=auto goes on as the snapshot was computed"
    if trainer.recompute != "none":
        return False, f"trainer.recompute={trainer.recompute} does not go with it"
    known = COMPILING.get(f"{device_type} {dtype}", COMPILING.get(device_type))
    if known is None:
        return False, f"trainer.compile=auto has no limit for {device_type}"
    flops = flops_per_token * config.data.block_size * trainer.batch_size * trainer.max_steps
    reason = f"the run has {flops:.1e} FLOPs, and trainer.compile=auto compiles from {known.fewest_flops:.1e}"
    if known.saved:
        reason += f"; compiling saves {known.saved} of a step"
    return flops >= known.fewest_flops, reason


def can_compile_block(model: GPT, x: Tensor, autocast: Autocast, dtype: torch.dtype) -> bool:
    """Compile a new block, like the blocks of `model`, for (B, T, C) activations `x`, and try it.

    Returns whether compiling succeeds and the compiled block computes about what the block computes. A
    failure is logged. Success fills the compiler's cache. `dtype` is the type of the block's weights; only
    the shape and device of `x` matter. Seeds torch with 0. `autocast()` is the context of a forward pass.
    """
    try:
        import torch._inductor.config as inductor

        # Deterministic: kernels are not chosen by their timing.
        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
        torch.manual_seed(0)
        block = model.make_block(model.config).to(x.device, dtype)
        for weight in block.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        x = torch.randn_like(x, dtype=dtype, requires_grad=True)
        plain, compiled = (
            gradients(compute, block, x, model, autocast)
            for compute in (block.compute, torch.compile(block.compute, dynamic=False))
        )
        check_compiled(compiled, plain, model.config.dropout > 0)
    except Exception as error:  # any stage of the compiler may fail; training does without it
        log.warning(f"torch.compile failed ({reason_of(error)}); going on without it")
        return False
    return True


def gradients(
    compute: Callable[..., Tensor], block: Block, x: Tensor, model: GPT, autocast: Autocast
) -> list[Tensor]:
    """Return [output of `compute`, gradient of `x`, gradients of the weights of `block` ...].

    `compute` is a method of `block`, compiled or not. The gradients are those of the output's sum of squares.
    """
    with autocast():
        y = compute(x, model.positions())
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])]


def check_compiled(compiled: list[Tensor], plain: list[Tensor], has_dropout: bool) -> None:
    """Raise ArithmeticError if a tensor in `compiled` differs much from the one at its place in `plain`.

    The lists are results of `gradients`, for a compiled block and for the block itself. With dropout, a
    compiled block drops other elements, so only the norms of the tensors are compared, and roughly.
    """
    for own, expected in zip(compiled, plain, strict=True):
        size, difference = expected.float().norm(), (own.float() - expected.float()).norm()
        if has_dropout:
            difference = (own.float().norm() - size) * MAX_DIFFERENCE
        if not difference.abs() <= MAX_DIFFERENCE * size:
            raise ArithmeticError("a compiled block computes other gradients than the block itself")


def compile_blocks(model: GPT) -> None:
    """Make torch.compile compile each block by itself, at its first call in training."""
    for block in model.h:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, dynamic=False)  # type: ignore[method-assign]
