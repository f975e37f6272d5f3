"""The optimizer of a run: which parameter is updated by which algorithm."""

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
        matrices = {
            name: weight for name, weight in self.named.items() if weight.ndim == 2 and name.startswith("h.")
        }
        hidden = matrices if config.name == "muon" else {}
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
