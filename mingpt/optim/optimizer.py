"""The optimizer of a run: which parameter is updated by which algorithm."""

from collections.abc import Mapping

from torch import Tensor

from mingpt.config import OptimizerConfig
from mingpt.optim.adamw import AdamW
from mingpt.optim.exchange import Exchange
from mingpt.optim.muon import Muon

ALONE = Exchange()


class Optimizer:
    """AdamW for every tensor, or Muon for the blocks' matrices and AdamW for the rest.

    `weights` are this worker's rows of each parameter (all of them, unless `exchange.is_sharded`),
    contiguous, updated in place; there may be no rows. `shapes` are those of the whole parameters, in one
    order on all workers. All workers call `step` together.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        config: OptimizerConfig,
        exchange: Exchange = ALONE,
    ) -> None:
        hidden = {name: weight for name, weight in weights.items() if uses_muon(name, shapes[name], config)}
        rest = {name: weight for name, weight in weights.items() if name not in hidden}
        self.parts: list[AdamW | Muon] = [AdamW(rest, shapes, config)]
        if hidden:
            self.parts.append(Muon(hidden, shapes, config, exchange))

    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update every weight at this learning rate from its gradient, which is left as it is."""
        for part in self.parts:
            part.step(lr, gradients)

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
