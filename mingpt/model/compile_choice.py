"""Whether a model is compiled: with trainer.compile=auto, where that pays for the first compilation twice.

A function of the configuration and of the kind of device alone, so that it is the same for any number of
workers and on every machine of a kind. Time is nominal for that reason: planned FLOPs at a rate that stands
here. Where the constants are wrong the choice costs time, and never the promise of the same bits.
"""

from dataclasses import dataclass

from mingpt.config import Config
from mingpt.errors import UserError
from mingpt.model.shapes import flops_per_token

PAID_BACK = 2  # times, so that a run that is restarted elsewhere, or stopped early, loses nothing


@dataclass(frozen=True)
class Costs:
    """Of a kind of device."""

    flops_per_s: float  # of a run that is not compiled, all workers together
    saved_share: float  # 1 - time of a compiled step / time of one that is not
    start_s: float  # first compilation, without a cache: beside the blocks
    block_s: float  # and for each block


# cpu: a core of an Intel Xeon with AMX, bfloat16, torch 2.13. It reached 0.12 TFLOP/s at the default run and
# at nanoGPT's CPU size, 0.3 at 10.65 M; the compiler saved 0.50, 0.39 and 0.25 of a micro-batch, and took
# 22 s for 2 blocks and 25 s for 4. Here stand two such cores at the best of these rates, and a little less
# than the least share. benchmarks/compile_cost.py measures them.
# cuda: estimates, not measured.
COSTS = {
    "cpu": Costs(flops_per_s=5e11, saved_share=0.2, start_s=20.0, block_s=2.0),
    "cuda": Costs(flops_per_s=2e14, saved_share=0.25, start_s=40.0, block_s=2.0),
}


@dataclass(frozen=True)
class CompileChoice:
    """And why, in words."""

    is_compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{'compiled' if self.is_compiled else 'not compiled'}: {self.reason}"


def choose_compile(
    config: Config, vocab_size: int, device_type: str, recorded: bool | None = None
) -> CompileChoice:
    """What trainer.compile becomes on "cpu", "cuda" or "mps".

    `recorded`: whether the snapshot that the run goes on from was compiled; auto then does as it did, also if
    trainer.max_steps is another by now. None for a run that has trained nothing yet. Raises UserError if that
    contradicts trainer.recompute.
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
    flops = flops_per_token(config.model, vocab_size=vocab_size, block_size=block_size)
    planned_s = flops * block_size * trainer.batch_size * trainer.max_steps / costs.flops_per_s
    saved_s = costs.saved_share * planned_s
    compile_s = costs.start_s + costs.block_s * config.model.n_layer
    return CompileChoice(
        saved_s >= PAID_BACK * compile_s,
        f"trainer.compile=auto estimates {compile_s:,.0f} s to compile first, and {saved_s:,.0f} s saved of "
        f"{planned_s:,.0f} s planned",
    )
