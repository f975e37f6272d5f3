"""Elastic jobs: how torchrun's agents find each other, agree on a group, and notice who joined or left.

With torch's own rendezvous, a job does not survive every loss. Its c10d backend has a host whose death ends
the job. Its file store writes a log that grows with every heartbeat, and unpickles the content. Neither
leaves out a node that reaches the meeting place but not its peers. And with the store that agents share with
their workers, an agent that joins in mid-run kills the job.

Here agents see each other in a folder, or at several hosts, of which one must live. They speak JSON, every
network call has a time limit, and any node may die. `launch/elastic.sh` starts torchrun with this rendezvous.
Only handler.py imports torch, and command.py for `--nproc gpu`.
"""

from collections.abc import Callable
from typing import Any


def rendezvous_backend() -> Callable[[Any], Any]:
    """Return the class that makes a handler from parameters. torchrun calls this as one of its plugins."""
    from mingpt.launch.elastic.handler import ElasticRendezvous

    return ElasticRendezvous
