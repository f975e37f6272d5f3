"""Train a GPT: `main` is the program of train.py and of the command mingpt-train.

`python -m mingpt.launch.train` does what train.py does, also where there is no train.py; torchrun, too, may
start this module by `-m`. torch is not imported before the worker listens for signals.
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

        context = worker.meet(config.trainer.timeout_s)
        worker.stopped_by = Trainer(build_run(config, context, find_start(config, context))).run()


if __name__ == "__main__":
    sys.argv[0] = "-m"  # no file: the workers are started in the same way
    main()
