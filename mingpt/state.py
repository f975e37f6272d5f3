"""The whole state of a run between two steps: model, optimizer and position in the data."""

from collections.abc import Mapping

from torch import Tensor

from mingpt.model import GPT
from mingpt.optim import Optimizer
from mingpt.parallel import Strategy


class TrainState:
    """What a snapshot holds. `step` counts completed steps, `windows_seen` windows read by all ranks."""

    def __init__(
        self, model: GPT, optimizer: Optimizer, strategy: Strategy, step: int = 0, windows_seen: int = 0
    ) -> None:
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.step, self.windows_seen = step, windows_seen

    def full_state(self) -> dict[str, Tensor]:
        """Full (unsharded) tensors under "model.<name>" and "optimizer.<parameter>.<state>".

        They are valid until the next step. Collective: all ranks call it.
        """
        weights = {f"model.{name}": weight.detach() for name, weight in self.model.named_parameters()}
        optimizer = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_dict().items()}
        return self.strategy.full_state(weights | optimizer)

    def load_optimizer(self, full: Mapping[str, Tensor]) -> None:
        """Take over an optimizer's state, under names without the prefix. Collective."""
        self.strategy.load_full_state(self.optimizer.state_dict(), full)

    def advance(self, windows: int) -> None:
        """A step over so many windows is complete."""
        self.step += 1
        self.windows_seen += windows
