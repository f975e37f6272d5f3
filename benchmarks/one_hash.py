"""Do ddp, ddp with a sharded optimizer, and fsdp end with the same tensors, for several numbers of workers?

    python benchmarks/one_hash.py                                       # ten minutes on two cores; Linux
    python benchmarks/one_hash.py --workers 1,2 --steps 2 --no_jobs     # a minute or two

Architectures (all, or those of --arch), both optimizers, float32 and bfloat16 are combined; one more
configuration is trained under torchrun. Prints a row per configuration, as JSON, with hashes of the tensors.
Exit code 1 if a row has several hashes.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch.distributed.fsdp  # noqa: F401 - imported once, before the forks
from common import Settings, argument_parser, row, short_hash, train, work_folder
from support.jobs import free_port
from torch import multiprocessing

from mingpt.config.cli import build
from mingpt.config.settings import Arch
from mingpt.distributed import Worker
from mingpt.tools import verify
from mingpt.training.run import build_run
from mingpt.training.start import find_start
from mingpt.training.trainer import Trainer

STRATEGIES = verify.STRATEGIES | {
    "fsdp, recompute": {"trainer.parallel": "fsdp", "trainer.recompute": "block"}
}
SETTINGS = {
    "data.block_size": 24, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 36, "model.dropout": 0.1,
    "trainer.batch_size": 18, "trainer.micro_batch_size": 2, "trainer.eval_every": 1000,
    "trainer.eval_windows": 4, "trainer.log_every": 20, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "snapshot.every": 1000, "snapshot.memory_every": 0, "optimizer.grad_clip": 0.2,
}  # fmt: skip
WIDE = 768  # more than 25 MiB of weights, which is what fsdp gathers whole


def run_worker(rank: int, settings: Settings, workers: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    with Worker() as worker:
        config = build(dict(settings))
        context = worker.connect(config.trainer.device, config.trainer.dtype)
        worker.stopped_by = Trainer(build_run(config, context, find_start(config, context))).run()


def configurations(archs: Sequence[str]) -> Iterator[dict[str, Any]]:
    for arch, optimizer, dtype in itertools.product(archs, ("adamw", "muon"), ("float32", "bfloat16")):
        chosen = {"model.arch": arch, "optimizer.name": optimizer, "trainer.dtype": dtype}
        yield chosen
    yield chosen | {"model.n_embd": WIDE, "trainer.dtype": "float32"}  # fast on every CPU


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", default="1,2,3,4,5,8")
    parser.add_argument("--arch", default=",".join(get_args(Arch)))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no_jobs", action="store_true", help="leave out the jobs under torchrun")
    arguments = parser.parse_args()
    workers = [int(word) for word in arguments.workers.split(",")]
    several, began = 0, time.monotonic()
    with work_folder() as folder:
        for number, chosen in enumerate(configurations(arguments.arch.split(","))):
            hashes: dict[str, dict[str, str]] = {}
            for (strategy, more), count in itertools.product(STRATEGIES.items(), workers):
                run_dir = folder / f"{number}-{strategy}-{count}".replace(" ", "")
                own = {"run_dir": str(run_dir), "trainer.max_steps": arguments.steps}
                given = (SETTINGS | chosen | more | own, count, free_port())
                multiprocessing.start_processes(run_worker, given, count, start_method="fork")
                hashes.setdefault(strategy, {})[str(count)] = short_hash(run_dir)
            distinct = {found for by_count in hashes.values() for found in by_count.values()}
            several += len(distinct) > 1
            row(**chosen, hashes=len(distinct), **hashes)
        if not arguments.no_jobs:
            chosen = {"model.arch": "modern", "optimizer.name": "muon", "trainer.dtype": "bfloat16"}
            chosen["trainer.max_steps"] = arguments.steps
            ends = {}
            for (strategy, more), count in itertools.product(STRATEGIES.items(), (1, 2)):
                run_dir = folder / f"job-{strategy}-{count}".replace(" ", "")
                train(run_dir, SETTINGS | chosen | more, workers=count)
                ends[f"{strategy}, {count}"] = short_hash(run_dir)
            distinct = set(ends.values())
            several += len(distinct) > 1
            row(under="torchrun", hashes=len(distinct), **ends)
    row(**{"configurations with several hashes": several, "seconds": round(time.monotonic() - began)})
    return 1 if several else 0


if __name__ == "__main__":
    sys.exit(main())
