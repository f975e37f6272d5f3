"""AdamW (Loshchilov and Hutter 2019) by torch's fused kernel.

The kernel is called without torch.optim around it: the first torch.optim.Optimizer that is constructed
imports torch._dynamo, which takes as long as torch itself, at every start and every restart.
"""

import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig

EPSILON = 1e-8


class AdamW:
    """Weights with two or more dimensions decay, others do not."""

    def __init__(self, weights: dict[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        decaying = {name: weight for name, weight in weights.items() if weight.ndim >= 2}
        others = {name: weight for name, weight in weights.items() if weight.ndim < 2}
        self.groups = [(decaying, config.weight_decay), (others, 0.0)]
        self.state = {
            name: {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
            for name, weight in weights.items()
        }

    def step(self, lr: float) -> None:
        """Update every weight in place from its gradient."""
        for weights, weight_decay in self.groups:
            if not weights:
                continue
            states = [self.state[name] for name in weights]
            steps, means, squares = (
                [state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq")
            )
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                list(weights.values()), gradients_of(weights), means, squares, [], steps,
                lr=lr, beta1=self.config.beta1, beta2=self.config.beta2, weight_decay=weight_decay,
                eps=EPSILON, amsgrad=False, maximize=False,
            )  # fmt: skip


def gradients_of(weights: dict[str, nn.Parameter]) -> list[Tensor]:
    gradients = [weight.grad for weight in weights.values()]
    assert all(gradient is not None for gradient in gradients), "every parameter takes part in every step"
    return gradients  # type: ignore[return-value]
