"""A worker's life from its first line to its exit code, the same for train.py and for the proof of it."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mingpt.cluster import Cluster, is_lost_peer
from mingpt.config import Config, UserError
from mingpt.launch import EndOfJob, Launch
from mingpt.stopping import Listener


def work(read: Callable[[], Config], make_trainer: Callable[[Config, Cluster], Any]) -> NoReturn:
    """Read the configuration, join the cluster, run the trainer, leave with the exit code that says how it went."""
    launch = Launch.from_environment()
    listener = Listener(launch.agent)
    cluster = trainer = None
    try:
        config = read()
        cluster = Cluster(launch, config.trainer, listener)
        trainer = make_trainer(config, cluster)
        stopped_by = trainer.run()
    except (UserError, EndOfJob) as error:
        launch.refuse(error, lambda: listener.asked == "SIGTERM")
    except Exception as error:
        if trainer is not None:
            trainer.failed(error)
        if cluster is not None:
            cluster.leave_after(error)
        if not is_lost_peer(error):
            raise
        sys.exit(1)  # while the workers were still meeting: the next generation tells
    cluster.leave(stopped_by)
