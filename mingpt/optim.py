"""Parameter groups, optimizers, learning-rate schedule."""

import math

import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The rate of the update that makes `step` (from 1) complete: linear warm-up, then a cosine."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    floor = config.min_lr_fraction
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW for every tensor, or Muon (Jordan 2024) for the blocks' matrices and AdamW for the rest. State goes by parameter name.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025), so that one learning rate serves both.
    Tensors with two or more dimensions decay, others do not.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.named = dict(model.named_parameters())
        hidden = {name for name, weight in self.named.items() if weight.ndim == 2 and name.startswith("h.")} if config.name == "muon" else set()
        rest = [(name, weight) for name, weight in self.named.items() if name not in hidden]
        groups = [
            {"params": [weight for _, weight in rest if weight.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [weight for _, weight in rest if weight.ndim < 2], "weight_decay": 0.0},
        ]
        fused = all(weight.device.type in ("cpu", "cuda") for weight in self.named.values())
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused
            )
        ]
        if hidden:
            self.parts.append(
                torch.optim.Muon(
                    [self.named[name] for name in self.named if name in hidden],
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, rate: float) -> None:
        """Update every parameter from its gradient at this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """{"<parameter>.<state>": tensor}, empty before the first step."""
        return {
            f"{name}.{key}": value
            for name, weight in self.named.items()
            for part in self.parts
            for key, value in part.state.get(weight, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave, onto each parameter's device."""
        for name, weight in self.named.items():
            mine = {key.rpartition(".")[2]: value for key, value in state.items() if key.rpartition(".")[0] == name}
            for part in self.parts:
                if any(weight is member for group in part.param_groups for member in group["params"]):
                    # A fused step counts on the parameter's device.
                    part.state[weight] = {key: value.to(weight.device, copy=True) for key, value in mine.items()}
