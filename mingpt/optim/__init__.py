"""Gradients to updates: AdamW, Muon and the learning rate, the same bits for any number of workers.

Works on the rows of each parameter that a worker holds. State is held by parameter name, as a snapshot stores
it. Knows no model beyond names and shapes.
"""

from mingpt.optim.muon import Exchange
from mingpt.optim.optimizer import Optimizer, learning_rate, state_shapes

__all__ = [
    "Exchange",
    "Optimizer",
    "learning_rate",
    "state_shapes",
]
