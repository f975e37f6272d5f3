"""Elastic jobs: how torchrun's agents find each other, agree on a group, and notice who joined or left.

With torch's own rendezvous, a job does not survive every loss. torch's c10d backend needs a host whose death
ends the job. torch's file store writes a log that grows with every heartbeat, and unpickles the content.
Neither leaves out a node that reaches the store but not the other nodes. If agents share the store with their
workers, an agent that joins in mid-run kills the job.

Here agents find each other in a shared folder, or at several hosts, of which one must be alive. Agents
exchange JSON, each wait for an answer has a time limit, and any node may die. `launch/elastic.sh` starts
torchrun with this rendezvous. handler.py imports torch; command.py does so only for `--nproc gpu`.
"""

from collections.abc import Callable
from typing import Any


def rendezvous_backend() -> Callable[[Any], Any]:
    """Return the class ElasticRendezvous. torchrun calls this function, the entry point of a plugin."""
    from mingpt.launch.elastic.handler import ElasticRendezvous

    return ElasticRendezvous
