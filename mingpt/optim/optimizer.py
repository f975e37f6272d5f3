"""The optimizer of a run: which parameter is updated by which algorithm."""

from collections.abc import Mapping

from torch import Tensor, nn

from mingpt.config import OptimizerConfig
from mingpt.optim.adamw import AdamW
from mingpt.optim.muon import AllGather, Muon


def add_dimension(row: Tensor) -> Tensor:
    """The all-gather of a single worker."""
    return row.unsqueeze(0)


class Optimizer:
    """AdamW for every tensor, or Muon for the blocks' matrices and AdamW for the rest.

    All workers call `step` together; `all_gather` exchanges what each has computed.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        rank: int = 0,
        workers: int = 1,
        all_gather: AllGather = add_dimension,
    ) -> None:
        self.named = dict(model.named_parameters())
        hidden = {
            name: weight
            for name, weight in self.named.items()
            if uses_muon(name, tuple(weight.shape), config)
        }
        rest = {name: weight for name, weight in self.named.items() if name not in hidden}
        self.parts: list[AdamW | Muon] = [AdamW(rest, config)]
        if hidden:
            self.parts.append(Muon(hidden, config, rank, workers, all_gather))

    def step(self, lr: float) -> None:
        """Update every parameter from its gradient at this learning rate."""
        for part in self.parts:
            part.step(lr)

    def zero_grad(self) -> None:
        for weight in self.named.values():
            weight.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """{"<parameter>.<state>": tensor}; the tensors themselves, not copies."""
        return {
            f"{name}.{key}": value
            for part in self.parts
            for name, states in part.state.items()
            for key, value in states.items()
        }


def uses_muon(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> bool:
    """Whether a parameter is updated by Muon; the others are by AdamW."""
    return config.name == "muon" and len(shape) == 2 and name.startswith("h.")


def state_shapes(
    parameters: Mapping[str, tuple[int, ...]], config: OptimizerConfig
) -> dict[str, tuple[int, ...]]:
    """The shapes of `Optimizer.state_dict()` for parameters of these shapes, without allocating them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        if uses_muon(name, shape, config):
            shapes[f"{name}.momentum_buffer"] = shape
        else:
            shapes |= {f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
    return shapes
