"""AdamW (Loshchilov and Hutter 2019) by torch's fused kernel.

The kernel is called without torch.optim around it: the first torch.optim.Optimizer that is constructed
imports torch._dynamo, which takes as long as torch itself, at every start and every restart.

On the CPU the kernel computes 16 elements at a time, and rounds those that are left over differently from the
others. Tensors are therefore padded with zeros to a multiple of 16: an element's bits do not depend on where
the tensor is cut.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mingpt.config import OptimizerConfig

EPSILON = 1e-8
CPU_MULTIPLE = 16  # elements


class AdamW:
    """Weights with two or more dimensions decay, others do not.

    `weights` are all of each parameter or some of its rows, contiguous, updated in place.
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
        # What the kernel updates; `state` shows the same memory without padding.
        self.stored = {
            name: {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": padded(torch.zeros_like(weight)),
                "exp_avg_sq": padded(torch.zeros_like(weight)),
            }
            for name, weight in self.weights.items()
        }
        self.state = {
            name: {
                "step": self.stored[name]["step"],
                "exp_avg": unpadded(self.stored[name]["exp_avg"], weight),
                "exp_avg_sq": unpadded(self.stored[name]["exp_avg_sq"], weight),
            }
            for name, weight in self.weights.items()
        }

    @torch.no_grad()
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update every weight in place from its gradient of the same shape, which is left as it is."""
        assert gradients.keys() >= self.weights.keys(), "every parameter takes part in every step"
        for names, weight_decay in self.groups:
            if not names:
                continue
            torch._foreach_add_([self.stored[name]["step"] for name in names], 1)
            filled = [name for name in names if self.weights[name].numel()]
            if filled:
                self.update(filled, gradients, lr, weight_decay)

    def update(
        self, names: list[str], gradients: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        weights = [padded(self.weights[name]) for name in names]
        grads = [padded(gradients[name]) for name in names]
        stored = [self.stored[name] for name in names]
        steps, means, squares = ([one[key] for one in stored] for key in ("step", "exp_avg", "exp_avg_sq"))
        torch._fused_adamw_(
            weights, grads, means, squares, [], steps,
            lr=lr, beta1=self.config.beta1, beta2=self.config.beta2, weight_decay=weight_decay,
            eps=EPSILON, amsgrad=False, maximize=False,
        )  # fmt: skip
        for name, updated in zip(names, weights, strict=True):
            if missing(self.weights[name]):
                self.weights[name].copy_(unpadded(updated, self.weights[name]))


def missing(tensor: Tensor) -> int:
    """Elements that a tensor lacks to the multiple that its device's kernel wants."""
    return -tensor.numel() % CPU_MULTIPLE if tensor.device.type == "cpu" else 0


def padded(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of its elements with zeros behind them, (n,)."""
    if not missing(tensor):
        return tensor
    longer = tensor.new_zeros(tensor.numel() + missing(tensor))
    longer[: tensor.numel()] = tensor.flatten()
    return longer


def unpadded(tensor: Tensor, like: Tensor) -> Tensor:
    """A view of what is not padding, in the shape of another tensor."""
    return tensor.view(-1)[: like.numel()].view_as(like) if missing(like) else tensor
