"""Turn gradients into updates: AdamW, Muon and the learning rate, the same bits for any number of workers.

An optimizer updates the rows of each parameter that a worker holds. Its state is kept by parameter name, as a
snapshot stores it. It needs only the names and shapes of parameters, not the model.
"""

from mingpt.optim.muon import Collectives
from mingpt.optim.optimizer import Optimizer, learning_rate, state_shapes

__all__ = ["Collectives", "Optimizer", "learning_rate", "state_shapes"]
