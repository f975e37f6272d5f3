"""Elastic jobs: how torchrun's agents find each other, agree on a group, and notice who joined or left.

With torch's own rendezvous, a job does not survive every loss. Its c10d backend has a host whose death ends
the job. Its file store writes a log that grows with every heartbeat, and unpickles the content. Neither
leaves out a node that reaches the meeting place but not its peers. And with the store that agents share with
their workers, an agent that joins in mid-run kills the job.

Here agents see each other in a folder, or at any of several hosts. They speak JSON, every call has a time
limit, and any node may die. `launch/elastic.sh` starts torchrun with this rendezvous. Only the handler
imports torch.
"""

from collections.abc import Callable
from typing import Any


def rendezvous_backend() -> Callable[[Any], Any]:
    """The entry point of torchrun's group `torchrun.handlers`: a function from parameters to a handler."""
    from mingpt.launch.elastic.handler import ElasticRendezvous

    return ElasticRendezvous
