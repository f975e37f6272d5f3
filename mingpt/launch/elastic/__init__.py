"""Elastic jobs: how torchrun's agents find each other, agree on a group, and notice who joined or left.

With torch's own rendezvous, a job does not survive every loss. Its c10d backend has a host whose death ends
the job. Its file store writes a log that grows with every heartbeat, and unpickles the content. Neither
leaves out a node that reaches the store but not its peers. And if agents share the store with their workers,
an agent that joins in mid-run kills the job.

Here agents find each other in a shared folder, or at several hosts, of which one must be alive. They exchange
JSON, every network call has a time limit, and any node may die. `launch/elastic.sh` starts torchrun with this
rendezvous. Only handler.py imports torch, and command.py for `--nproc gpu`.
"""

from collections.abc import Callable
from typing import Any


def rendezvous_backend() -> Callable[[Any], Any]:
    """Return the class of torchrun's rendezvous handler. torchrun calls this as the entry of a plugin."""
    from mingpt.launch.elastic.handler import ElasticRendezvous

    return ElasticRendezvous
