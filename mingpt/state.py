"""The whole state of a run between two steps: model, optimizer and position in the data.

A rank may hold some rows of a tensor alone: then its part here is these rows.
"""

import torch
from torch import Tensor

from mingpt.model import GPT
from mingpt.optim import Optimizer
from mingpt.parallel import Strategy, split_rows

Shape = tuple[int, ...]


class TrainState:
    """What a snapshot holds. `step` counts completed steps, `windows_seen` windows read by all ranks."""

    def __init__(
        self, model: GPT, optimizer: Optimizer, strategy: Strategy, step: int = 0, windows_seen: int = 0
    ) -> None:
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.step, self.windows_seen = step, windows_seen

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts, under "model.<name>" and "optimizer.<parameter>.<state>".

        They are the state itself, and change with the next step.
        """
        weights = {f"model.{name}": weight for name, weight in self.strategy.held_weights().items()}
        return weights | {f"optimizer.{name}": part for name, part in self.optimizer.state_dict().items()}

    def shapes(self) -> dict[str, Shape]:
        """Of the whole tensors."""
        shapes = {f"model.{name}": shape for name, shape in self.strategy.shapes.items()}
        for name, part in self.optimizer.state_dict().items():
            parameter = name.rpartition(".")[0]
            shapes[f"optimizer.{name}"] = self.strategy.shapes[parameter] if part.ndim else ()
        return shapes

    def rows_by_rank(self, name: str, shape: Shape) -> list[range] | None:
        """Which rows of a tensor each rank holds; None if each holds all."""
        strategy = self.strategy
        is_sharded = (
            strategy.weights_are_sharded if name.startswith("model.") else strategy.updates_are_sharded
        )
        return split_rows(shape[0], strategy.world_size) if is_sharded and shape else None

    def first_rows(self) -> dict[str, int]:
        """The first row that this rank holds of each tensor."""
        rows = {name: self.rows_by_rank(name, shape) for name, shape in self.shapes().items()}
        return {name: part[self.strategy.rank].start if part else 0 for name, part in rows.items()}

    def advance(self, windows: int) -> None:
        """A step over so many windows is complete."""
        self.step += 1
        self.windows_seen += windows


@torch.no_grad()
def copy_rows(part: Tensor, first: int, begin: int, rows: Tensor) -> None:
    """Copy the rows of a tensor from `begin` on, as far as they are in a part whose first row is `first`."""
    if not part.ndim:
        part.copy_(rows.view(()))
        return
    low, high = max(first, begin), min(first + len(part), begin + len(rows))
    if low < high:
        part[low - first : high - first].copy_(rows[low - begin : high - begin])
