"""Parameter groups, optimizers, learning-rate schedule.

AdamW is torch's own fused kernel, called without torch.optim around it: the first torch.optim.Optimizer that is made imports
torch._dynamo, which takes as long as torch itself, at every start and every restart. Muon orthogonalises equal shapes in batched
products, and the workers share that work.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig

EPSILON = 1e-8
# Matrices in one product; the same for any number of workers, who deal whole batches among themselves. A GPU waits for launches before it
# waits for products.
BATCHED = {"cpu": 3, "cuda": 12}
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]

Share = Callable[[Tensor], Tensor]  # (n,) of each worker to (workers, n), the same on all


def learning_rate(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The rate of the update that makes `step` (from 1) complete: linear warm-up, then a cosine."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    floor = config.min_lr_fraction
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class AdamW:
    """Loshchilov and Hutter 2019. Weights with two or more dimensions decay, others do not."""

    def __init__(self, weights: dict[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.groups = [
            ({name: weight for name, weight in weights.items() if (weight.ndim >= 2) == decays}, config.weight_decay if decays else 0.0)
            for decays in (True, False)
        ]
        self.state = {
            name: {"step": torch.zeros((), device=weight.device), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            for name, weight in weights.items()
        }

    def step(self, rate: float) -> None:
        for weights, decay in self.groups:
            if not weights:
                continue
            states = [self.state[name] for name in weights]
            steps, means, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                list(weights.values()), gradients_of(weights), means, squares, [], steps,
                lr=rate, beta1=self.config.beta1, beta2=self.config.beta2, weight_decay=decay, eps=EPSILON, amsgrad=False, maximize=False,
            )  # fmt: skip


class Muon:
    """Jordan 2024: Nesterov momentum, made orthogonal. The updates have the root mean square of AdamW's (Liu et al. 2025).

    A batch of matrices is orthogonalised by one worker, which shares the result: by construction the bits do not depend on which.
    """

    def __init__(self, weights: dict[str, nn.Parameter], config: OptimizerConfig, rank: int, workers: int, share: Share | None) -> None:
        self.weights, self.config, self.rank, self.share = weights, config, rank, share
        self.state = {name: {"momentum_buffer": torch.zeros_like(weight)} for name, weight in weights.items()}
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, weight in weights.items():
            alike.setdefault(tuple(sorted(weight.shape)), []).append(name)
        size = BATCHED.get(next(iter(weights.values())).device.type, BATCHED["cpu"])
        batches = [names[first : first + size] for names in alike.values() for first in range(0, len(names), size)]
        self.dealt: list[list[list[str]]] = [[] for _ in range(workers)]
        load = [0] * workers
        for cost, batch in sorted(
            ((sum(min(weights[name].shape) * weights[name].numel() for name in batch), batch) for batch in batches), reverse=True
        ):
            least = load.index(min(load))
            self.dealt[least].append(batch)
            load[least] += cost
        self.room = max(sum(weights[name].numel() for batch in part for name in batch) for part in self.dealt)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        gradients = dict(zip(self.weights, gradients_of(self.weights), strict=True))
        buffers = {name: state["momentum_buffer"] for name, state in self.state.items()}
        torch._foreach_lerp_(list(buffers.values()), list(gradients.values()), 1 - self.config.momentum)
        computed = []
        for batch in self.dealt[self.rank]:
            ahead = [lying(gradients[name].lerp(buffers[name], self.config.momentum)) for name in batch]
            computed.append(orthogonal(torch.stack(ahead)).flatten())
        rest = self.room - sum(map(len, computed))
        mine = torch.cat([*computed, torch.zeros(rest, dtype=torch.bfloat16, device=next(iter(buffers.values())).device)])
        updates = self.share(mine) if self.share else mine.unsqueeze(0)
        torch._foreach_mul_(list(self.weights.values()), 1 - rate * self.config.weight_decay)
        for row, part in zip(updates, self.dealt, strict=True):
            names = [name for batch in part for name in batch]
            sizes = [self.weights[name].numel() for name in names]
            for name, update in zip(names, row[: sum(sizes)].split(sizes), strict=True):
                weight = self.weights[name]
                update = update.view_as(weight) if weight.size(0) <= weight.size(1) else update.view(weight.shape[::-1]).T
                weight.add_(update, alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))


def gradients_of(weights: dict[str, nn.Parameter]) -> list[Tensor]:
    gradients = [weight.grad for weight in weights.values()]
    assert all(gradient is not None for gradient in gradients), "every parameter takes part in every step"
    return gradients  # type: ignore[return-value]


def lying(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose, so that it is no taller than wide."""
    return matrix if matrix.size(0) <= matrix.size(1) else matrix.T


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, short, long) matrices with all singular values near one, in bfloat16: a quintic Newton-Schulz iteration (Jordan 2024)."""
    x = matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Optimizer:
    """AdamW for every tensor, or Muon for the blocks' matrices and AdamW for the rest. State goes by parameter name.

    With several workers, all of them call `step`; `share` hands out what each has computed.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, rank: int = 0, workers: int = 1, share: Share | None = None) -> None:
        self.named = dict(model.named_parameters())
        hidden = {name: weight for name, weight in self.named.items() if config.name == "muon" and weight.ndim == 2 and name.startswith("h.")}
        self.parts: list[AdamW | Muon] = [AdamW({name: weight for name, weight in self.named.items() if name not in hidden}, config)]
        if hidden:
            self.parts.append(Muon(hidden, config, rank, workers, share))

    def step(self, rate: float) -> None:
        """Update every parameter from its gradient at this learning rate."""
        for part in self.parts:
            part.step(rate)

    def zero_grad(self) -> None:
        for weight in self.named.values():
            weight.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """{"<parameter>.<state>": tensor}."""
        return {f"{name}.{key}": value for part in self.parts for name, states in part.state.items() for key, value in states.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        for key, mine in self.state_dict().items():
            mine.copy_(state[key])
