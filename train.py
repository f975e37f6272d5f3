"""Train a GPT: python train.py [CONFIG.yaml] [section.key=value ...]; torchrun may start it. See README.md.

Exit codes:

- 0 if the run is finished or was stopped.
- 128 + signal after a second signal (1 under plain `python` with several workers) and, under torchrun, after
  any signal except SIGUSR1.
- 2 for a mistake that only the user can correct.
- 1 for any other error.
"""

import sys

from mingpt.distributed import Worker


def main() -> None:
    with Worker() as worker:  # listens for signals; turns the end of this block into an exit code
        from mingpt.config.cli import parse

        config = parse(sys.argv[1:])

        from mingpt.launch.agent import start_workers

        # Under plain `python`, for several workers, this process becomes their agent and exits here.
        start_workers(worker, config, sys.argv)

        from mingpt.training.run import build_run
        from mingpt.training.start import find_start
        from mingpt.training.trainer import Trainer

        chosen = config.trainer
        context = worker.connect(chosen.device, chosen.dtype, chosen.threads, chosen.timeout_s)
        trainer = Trainer(build_run(config, context, find_start(config, context)))
        worker.stopped_by = trainer.run()


if __name__ == "__main__":
    main()
