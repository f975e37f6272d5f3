"""Counts the collectives of each worker in a step, and the bytes that the worker sends.

    python benchmarks/traffic.py                                          # 2 to 32 workers, half an hour
    python benchmarks/traffic.py --workers 2 --strategies "ddp exact" --optimizers adamw     # half a minute

The trainer runs in workers forked after one import of torch. Each worker takes the others for workers of
other nodes. torch's profiler names every collective of gloo, in every thread, with the number and the type of
its elements. The kernel counts the bytes of every socket. The results are counts, not seconds: they do not
depend on how busy a machine is. A worker that gives n bytes to a collective of W workers sends:

    all_to_all   n (W - 1) / W     its own part stays; if parts differ in size, on average over the workers
    all_gather   n (W - 1)         each worker passes on what it gets, in a ring
    all_reduce   2 n (W - 1) / W   a ring; also FSDP2's own reduce-scatter, which gloo does as an all-reduce
    broadcast    n (W - 1) / W     on average over the workers

`sent` is the sum of these bytes; `wire` is the bytes that sockets between workers have sent. Both are means
over the workers. `largest` is the largest `sent` of a worker. `calls` counts the first worker's collectives.
`ring` is the bytes of an all-reduce of the gradient: 2 (W - 1) / W x 4 bytes x parameters. Prints a row per
strategy, optimizer and number of workers, as JSON. Needs Linux.
"""

import itertools
import json
import math
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import SMALL, argument_parser, row, work_folder
from one_hash import train_forked

from mingpt.base import events
from mingpt.config.cli import build
from mingpt.distributed.transport import TRANSPORTS
from mingpt.tools.jobs import ROOT
from mingpt.tools.plan import estimate, find_vocab_size

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp exact": {},
    "ddp fast": {"trainer.reduction": "fast"},
    "ddp exact, sharded optimizer": {"trainer.shard_optimizer": True},
    "fsdp exact": {"trainer.parallel": "fsdp"},
    "fsdp fast": {"trainer.parallel": "fsdp", "trainer.reduction": "fast"},
}
SETTINGS = SMALL | {
    "data.path": str(ROOT / "data/input.txt"), "data.block_size": 16, "model.n_embd": 64,
    "trainer.max_steps": 4, "trainer.eval_at_start": False, "trainer.log_every": 100,
    "trainer.dtype": "float32", "trainer.timeout_s": 600,
    "snapshot.every": 1000, "snapshot.memory_every": 0,
}  # fmt: skip
COUNTED_STEP = 2  # DistributedDataParallel arranges its buckets after the first step
BYTES = {
    "float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "c10::BFloat16": 2, "bool": 1,
}  # fmt: skip
PREFIX = "gloo:"
ACKED_AT = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info


class Recorder:
    """Counts one worker's collectives and bytes in a step, and writes the counts to `path`, as JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.profile: Any = None
        self.wire = 0

    def begin(self, step: int) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        if step != COUNTED_STEP:
            return
        self.wire = sent_to_workers()
        self.profile = profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self.profile.__enter__()

    def end(self) -> None:
        if self.profile is None:
            return
        self.profile.__exit__(None, None, None)
        calls: Counter[str] = Counter()
        given: Counter[str] = Counter()
        for event in self.profile.profiler.kineto_results.events():
            if event.name().startswith(PREFIX):
                kind = event.name().removeprefix(PREFIX)
                sizes = zip(event.shapes(), event.dtypes(), strict=True)
                calls[kind] += 1
                given[kind] += sum(math.prod(shape) * BYTES[dtype] for shape, dtype in sizes)
        self.profile = None
        counted = {"calls": calls, "given": given, "wire": sent_to_workers() - self.wire}
        self.path.write_text(json.dumps(counted))


def sent_to_workers() -> int:
    """Return the acknowledged bytes that this process has sent by open TCP sockets, except to the store."""
    store_port, sent = int(os.environ["MASTER_PORT"]), 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                ports = one.getsockname()[1], one.getpeername()[1]
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED_AT + 8)
        except (OSError, IndexError):
            continue  # this is no TCP connection
        if store_port not in ports:
            sent += struct.unpack_from("Q", info, ACKED_AT)[0]
    return sent


def subscribe(folders: list[Path]) -> None:
    """Make workers that are forked later write their counts to the folder that is last in `folders`."""
    recorders: list[Recorder] = []

    def start(launch: Any) -> None:
        TRANSPORTS.clear()  # workers of one node would share memory
        recorders.append(Recorder(folders[-1] / f"{launch.rank}.json"))

    events.subscribe("worker_start", start)
    events.subscribe("step_start", lambda step: recorders[0].begin(step))
    events.subscribe("step_end", lambda **_: recorders[0].end())


def sent_bytes(given: dict[str, int], workers: int) -> dict[str, float]:
    """Return {collective: bytes sent} for a worker that gives collectives the bytes `given`."""
    rest = (workers - 1) / workers
    factors = {"all_to_all": rest, "all_gather": workers - 1, "all_reduce": 2 * rest, "broadcast": rest}
    return {kind: size * factors[kind] for kind, size in given.items()}


def summary(by_rank: Sequence[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the figures of a row (see the module's docstring), and `messages`.

    `messages` counts the first worker's messages, but no broadcasts: W - 1 per round of a ring or all-to-all.
    """
    totals = [sum(sent_bytes(counted["given"], workers).values()) for counted in by_rank]
    calls, rounds = by_rank[0]["calls"], {"all_to_all": 1, "all_gather": 1, "all_reduce": 2}
    return {
        "calls": calls,
        "messages": sum(rounds.get(kind, 0) * (workers - 1) * count for kind, count in calls.items()),
        "sent": round(sum(totals) / workers),
        "largest": round(max(totals)),
        "wire": round(sum(counted["wire"] for counted in by_rank) / workers),
    }


def measure(strategy: str, settings: dict[str, Any], workers: int, folder: Path) -> None:
    """Train, and print the row of a configuration."""
    train_forked(settings | {"run_dir": str(folder / "run")}, workers)
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    found = summary(by_rank, workers)
    config = build(settings)
    parameters = int(estimate(config, find_vocab_size(config), 1, True, 4)["weights"]) // 4
    micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
    row(
        strategy=strategy, optimizer=config.optimizer.name, workers=workers, parameters=parameters,
        micro_batches=micro_batches, rounds=-(-micro_batches // workers),
        ring=round(8 * parameters * (workers - 1) / workers), step=found,
    )  # fmt: skip


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32])
    parser.add_argument("--micro_batches", type=int, default=32, help="of a step")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
    arguments = parser.parse_args()
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401 - both are imported once, before the forks

    cases = itertools.product(arguments.workers, arguments.optimizers, arguments.strategies)
    folders: list[Path] = []
    subscribe(folders)
    with work_folder() as work:
        for number, (workers, optimizer, strategy) in enumerate(cases):
            folders.append(work / str(number))
            folders[-1].mkdir()
            chosen = {"optimizer.name": optimizer, "trainer.batch_size": arguments.micro_batches}
            measure(strategy, SETTINGS | chosen | STRATEGIES[strategy], workers, folders[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
