"""Makes TrainStates of small models: the whole state, or one rank's part."""

import functools
from types import SimpleNamespace
from typing import Any

from mingpt.base.rows import RowMap
from mingpt.config import OptimizerConfig
from mingpt.distributed.transport import Transport
from mingpt.optim import Optimizer
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.parallel.strategy import Strategy
from mingpt.training.state import TrainState
from support.exchanges import pieces
from support.single_process import SingleProcess
from support.training import Arch, Name, make_model


def make_state(name: Name, arch: Arch) -> TrainState:
    model, optimizer = make_model(name, arch)
    setup = StrategySetup(model, [range(2)], SingleProcess(), list(model.h))
    return TrainState(model, optimizer, ExactReduction(setup))


def shard_state(rank: int, workers: int, weights_too: bool) -> TrainState:
    """A rank's state: only the rank's rows of the optimizer's state and, if `weights_too`, of the weights."""
    model, _ = make_model("adamw", "gpt2")
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    rows = RowMap(shapes, workers, ("",))
    held = pieces({name: weight.detach() for name, weight in model.named_parameters()}, rows, rank)
    strategy: Any = SimpleNamespace(
        shapes=shapes,
        rank=rank,
        world_size=workers,
        weights_are_sharded=weights_too,
        updates_are_sharded=True,
        held_weights=lambda: held if weights_too else dict(model.named_parameters()),
    )
    strategy.state_rows = functools.partial(Strategy.state_rows, strategy)
    optimizer = Optimizer(held, OptimizerConfig(name="adamw"), rows, Transport(rank, workers))
    return TrainState(model, optimizer, strategy)
