"""The state of a run between two steps, in training and in a snapshot: model, optimizer and counters."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext
from mingpt.model import GPT
from mingpt.model.weights import check_shapes
from mingpt.optim import Optimizer
from mingpt.parallel import Strategy
from mingpt.snapshot import StoredState

GROWTH_STEPS = 2000  # steps in a row without overflow after which the loss scale doubles
# A gradient of zeros never overflows: without a limit the loss scale would become too large for float32.
MAX_LOSS_SCALE = 2.0**100


@dataclass
class LossScale:
    """The power of two by which a run in float16 multiplies its loss (Micikevicius et al. 2018, section 3.2).

    Without the factor, small gradients become zero in float16. The scale begins, grows and shrinks like the
    scale of torch.amp.GradScaler with default settings, but only between 1 and MAX_LOSS_SCALE.
    """

    scale: float = 65_536.0
    good_steps: int = 0  # LossScaleFields explains it

    def after_step(self, is_finite: bool) -> bool:
        """Change the scale, if needed, after a step; return whether the scale has been halved.

        `is_finite` says whether the step's gradient was finite. If it was not, the scale is halved, unless
        the scale is 1. After GROWTH_STEPS steps in a row with finite gradients, the scale is doubled, up to
        MAX_LOSS_SCALE.
        """
        if not is_finite and self.scale > 1.0:
            self.scale, self.good_steps = self.scale / 2, 0
            return True
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if self.good_steps >= GROWTH_STEPS:
            self.scale, self.good_steps = min(self.scale * 2, MAX_LOSS_SCALE), 0
        return False


class TrainState:
    """The state that a snapshot holds.

    `step` counts completed steps, `windows_seen` the windows (sequences of block_size + 1 tokens) that all
    ranks together have read. `skipped` has two counts of the updates that trainer.on_nonfinite=skip left out:
    (in all, in a row up to `step`). `loss_scale` is None if the run does not compute in float16.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        strategy: Strategy,
        step: int = 0,
        windows_seen: int = 0,
        skipped: Sequence[int] = (0, 0),
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.step, self.windows_seen, self.skipped = step, windows_seen, skipped
        self.loss_scale = loss_scale

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of each tensor, by "model.<name>" or "optimizer.<parameter>.<state>".

        The returned tensors are the state itself, not copies, and change with the next step.
        """
        weights = {f"model.{name}": weight for name, weight in self.strategy.held_weights().items()}
        return weights | {f"optimizer.{name}": part for name, part in self.optimizer.state_dict().items()}

    @functools.cached_property
    def rows(self) -> RowMap:
        """Which rows of each tensor each rank holds; `tensors` returns those of this rank."""
        shapes = {f"model.{name}": shape for name, shape in self.strategy.shapes.items()}
        for name, part in self.optimizer.state_dict().items():
            parameter = name.rpartition(".")[0]
            shapes[f"optimizer.{name}"] = self.strategy.shapes[parameter] if part.ndim else ()
        return self.strategy.state_rows(shapes)


@torch.no_grad()
def load_state(state: TrainState, stored: StoredState, context: DistributedContext) -> None:
    """Copy the weights of `stored` into `state`, and the optimizer's state if it fits. Collective.

    The optimizer's state fits if its tensors have the same names in `stored` and `state`; otherwise it is not
    copied. Learned positions past block_size are left out. Counters and loss scale are not set. Raises
    UserError if the weights do not fit. The rank that reads them may raise CorruptSnapshot or
    UnreadableSnapshot.
    """
    parts, held = state.tensors(), state.rows
    names = [name for name in stored.shapes if name.startswith("model.")]
    there = {name: stored.shapes[name] for name in names}
    here = {name: shape for name, shape in held.shapes.items() if name.startswith("model.")}
    check_shapes(there, here, f"the snapshot of step {stored.manifest.step}")
    optimizer = [name for name in stored.shapes if name.startswith("optimizer.")]
    if set(optimizer) == {name for name in held.shapes if name.startswith("optimizer.")}:
        names += optimizer
    stored.copy_into({name: parts[name] for name in names}, held, state.strategy.rank, context)
