"""A rendezvous for torchrun under which any node may die, join or leave, also the host of the store.

With torch's own rendezvous, c10d, a job does not survive every loss. Its TCP store needs a host whose death
ends the job, and its file store is a log that grows with every heartbeat. With both stores, agents unpickle
what they read, and a node that reaches the store but not the other nodes is not left out. If agents share the
store with their workers, an agent that joins in mid-run kills the job.

Here torchrun's agents find each other in a shared folder, or at a list of hosts, of which one must be alive.
Agents exchange JSON, each wait for an answer has a time limit, and any node may die. docs/anynode.md says
what a torchrun script must do. To run torchrun, the package needs torch and the standard library; importing
it does not import torch.
"""

from collections.abc import Callable
from typing import Any

# What the workers of a node find in their environment, besides torchrun's variables. The values are the same
# on all nodes.
JOB = "ANYNODE_JOB"  # the job's random token, which stays the same after nodes were lost
ROUND = "ANYNODE_ROUND"  # how many times the job's agents have started workers together
# The port, at MASTER_ADDR, of a TCPStore that lives as long as its agent. The agent writes nothing to it. The
# store at MASTER_PORT is new in each round.
STORE_PORT = "ANYNODE_STORE_PORT"


def rendezvous_backend() -> Callable[[Any], Any]:
    """Return the class of the rendezvous. torchrun calls this function of an installed anynode, a plugin."""
    from anynode.handler import AnyNodeRendezvous

    return AnyNodeRendezvous
