"""Turn gradients into updates: AdamW, Muon and the learning rate.

An optimizer gets tensors by name, not the model: all rows of each parameter, or only the rows that its worker
updates. From the same gradients, any number of workers computes the same bits. The optimizer's state is kept
by parameter name, as in a snapshot.
"""

from mingpt.optim.muon import Collectives
from mingpt.optim.optimizer import Optimizer, learning_rate, state_shapes

__all__ = ["Collectives", "Optimizer", "learning_rate", "state_shapes"]
