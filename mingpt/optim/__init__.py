"""Turn gradients into updates: AdamW, Muon and the learning rate; any number of workers gives the same bits.

An optimizer updates the rows of each parameter that its worker holds. Its state is kept by parameter name, as
in a snapshot. An optimizer gets tensors by name, not the model.
"""

from mingpt.optim.muon import Collectives
from mingpt.optim.optimizer import Optimizer, learning_rate, state_shapes

__all__ = ["Collectives", "Optimizer", "learning_rate", "state_shapes"]
