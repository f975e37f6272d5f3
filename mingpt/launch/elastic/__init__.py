"""Any node may die: how torchrun's agents find each other, agree on a group, and notice who joined or left.

torch's own c10d rendezvous has a host whose death ends the job, and its file store is a log that grows with
every sign of life and unpickles what stands there. None of torch's own leaves out a node that reaches the
meeting place but not its peers. And with the store that agents share with their workers, an agent that joins
in mid-run kills the job.

Here agents see each other in a folder, or at any of several hosts; they speak JSON, every call has a time
limit, and nobody in particular has to live. `launch/elastic.sh` starts torchrun with it. torch is imported
by the handler alone.
"""

from collections.abc import Callable
from typing import Any


def rendezvous_backend() -> Callable[[Any], Any]:
    """The entry point of torchrun's group `torchrun.handlers`: what makes a handler of its parameters."""
    from mingpt.launch.elastic.handler import ElasticRendezvous

    return ElasticRendezvous
