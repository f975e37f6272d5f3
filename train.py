"""Train a GPT: python train.py [CONFIG.yaml] [section.key=value ...], alone or under torchrun. README.md shows the ways.

Exit codes: 0 finished, or nothing was left to do; 2 something only the user can put right; 128 + signal when told to stop
under torchrun; 1 anything else.
"""

import sys

from mingpt.cluster import Cluster, EndOfJob, Launch
from mingpt.config import UserError, check_workers, parse
from mingpt.stopping import Listener


def main() -> None:
    launch = Launch.from_environment()
    listener, cluster = Listener(launch.agent), None
    try:
        config = parse(sys.argv[1:])
        if not launch.restarts:
            check_workers(config, launch.world_size)
        cluster = Cluster(launch, config.trainer, listener)
        from mingpt.trainer import Trainer  # after the settings are known to be right: it imports torch

        stopped_by = Trainer(config, cluster).run()
    except (UserError, EndOfJob) as error:
        launch.refuse(error)
    except Exception as error:
        if cluster is None:
            raise
        cluster.leave_after(error)
    cluster.leave(stopped_by)


if __name__ == "__main__":
    main()
