"""The optimizer of a run: which parameter is updated by which algorithm, and at which learning rate.

A learning-rate schedule is a function of the run's progress after warm-up, registered in SCHEDULES.

AdamW (Loshchilov and Hutter 2019) is torch's fused kernel, called without torch.optim. Constructing the first
torch.optim.Optimizer would import torch._dynamo, which takes as long as importing torch.

On a CPU the kernel computes up to 16 elements at a time, and may round the remaining elements differently. So
tensors there are padded with zeros to a multiple of 16: an element's bits do not depend on how rows are split
among workers.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import OptimizerConfig
from mingpt.optim.muon import Collectives, Muon

EPSILON = 1e-8
CPU_MULTIPLE = 16  # elements


class AdamW:
    """AdamW: weights with two or more dimensions decay, others do not.

    `weights` has, for each parameter, all, some or no rows. These tensors are contiguous, and are updated in
    place. `shapes` has the shapes of the whole parameters. Nothing is communicated.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], config: OptimizerConfig
    ) -> None:
        self.config = config
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        assert all(weight.is_contiguous() for weight in self.weights.values())
        decaying = [name for name in weights if len(shapes[name]) >= 2]
        others = [name for name in weights if len(shapes[name]) < 2]
        self.groups = [(decaying, config.weight_decay), (others, 0.0)]
        self.steps = {name: torch.zeros((), device=weight.device) for name, weight in self.weights.items()}
        # The tensors that the kernel updates; `state` shows the same memory without padding.
        self.means = {name: padded(torch.zeros_like(weight)) for name, weight in self.weights.items()}
        self.squares = {name: torch.zeros_like(mean) for name, mean in self.means.items()}
        self.state = {
            name: {
                "step": self.steps[name],
                "exp_avg": unpadded(self.means[name], weight),
                "exp_avg_sq": unpadded(self.squares[name], weight),
            }
            for name, weight in self.weights.items()
        }

    @torch.no_grad()
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update every weight in place from its gradient, which has the same shape and is not changed."""
        assert gradients.keys() >= self.weights.keys(), "every parameter takes part in every step"
        for names, weight_decay in self.groups:
            if not names:
                continue
            torch._foreach_add_([self.steps[name] for name in names], 1)
            filled = [name for name in names if self.weights[name].numel()]
            if filled:
                self.update(filled, gradients, lr, weight_decay)

    def update(
        self, names: list[str], gradients: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        weights = [padded(self.weights[name]) for name in names]
        grads = [padded(gradients[name]) for name in names]
        steps, means, squares = (
            [stored[name] for name in names] for stored in (self.steps, self.means, self.squares)
        )
        torch._fused_adamw_(
            weights, grads, means, squares, [], steps,
            lr=lr, beta1=self.config.beta1, beta2=self.config.beta2, weight_decay=weight_decay,
            eps=EPSILON, amsgrad=False, maximize=False,
        )  # fmt: skip
        for name, updated in zip(names, weights, strict=True):
            if missing(self.weights[name]):
                self.weights[name].copy_(unpadded(updated, self.weights[name]))


def missing(tensor: Tensor) -> int:
    """Return how many elements `tensor` needs to reach a multiple of CPU_MULTIPLE; 0 on a GPU."""
    return -tensor.numel() % CPU_MULTIPLE if tensor.device.type == "cpu" else 0


def padded(tensor: Tensor) -> Tensor:
    """Return a flat copy with `missing(tensor)` zeros at its end; if none are missing, the tensor itself."""
    if not missing(tensor):
        return tensor
    longer = tensor.new_zeros(tensor.numel() + missing(tensor))
    longer[: tensor.numel()] = tensor.flatten()
    return longer


def unpadded(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view of a tensor from `padded`, without the padding, in the shape of `like`."""
    return tensor.view(-1)[: like.numel()].view_as(like) if missing(like) else tensor


def cosine(progress: float) -> float:
    """Return a factor that falls from 1 to 0 as half a period of a cosine (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    return 1.0 - progress


# {value of optimizer.schedule: function of the progress after warm-up, which goes from 0 to 1}. The result of
# a function falls from 1, for the peak learning rate, to 0, for the minimum.
SCHEDULES: dict[str, Callable[[float], float]] = {"cosine": cosine, "linear": linear}


def learning_rate(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """Return the learning rate of update `step`, counted from 1: linear warm-up, then `config.schedule`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    floor = config.min_lr_fraction
    return config.learning_rate * (floor + (1 - floor) * SCHEDULES[config.schedule](progress))


class Optimizer:
    """AdamW for every tensor, or Muon for the blocks' matrices and AdamW for the rest, by `config.name`.

    `weights` has, by name, the rows of each parameter that this worker updates, as `rows` says; there may be
    no rows. The names have the same order on all workers. The tensors are contiguous, and are updated in
    place. All workers call `step` together. Muon's products are computed in `product_dtype`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: OptimizerConfig,
        rows: RowMap,
        transport: Collectives,
        product_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        hidden = {
            name: weight for name, weight in weights.items() if uses_muon(name, rows.shapes[name], config)
        }
        rest = {name: weight for name, weight in weights.items() if name not in hidden}
        self.parts: list[AdamW | Muon] = [AdamW(rest, rows.shapes, config)]
        if hidden:
            self.parts.append(Muon(hidden, config, rows, transport, product_dtype))

    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights in place. `gradients` have the same shapes and stay unchanged. Collective."""
        for part in self.parts:
            part.step(lr, gradients)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's state as {"<parameter>.<state>": tensor}. The tensors are not copies."""
        return {
            f"{name}.{key}": value
            for part in self.parts
            for name, states in part.state.items()
            for key, value in states.items()
        }


def uses_muon(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> bool:
    """Return whether Muon updates the parameter `name` of shape `shape`; if not, AdamW updates it."""
    return config.name == "muon" and len(shape) == 2 and name.startswith("h.")


def state_shapes(
    parameters: Mapping[str, tuple[int, ...]], config: OptimizerConfig
) -> dict[str, tuple[int, ...]]:
    """Return {key of `Optimizer.state_dict()`: unsharded shape}; `parameters` is {name: unsharded shape}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        if uses_muon(name, shape, config):
            shapes[f"{name}.momentum_buffer"] = shape
        else:
            shapes |= {f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
    return shapes
