"""Collectives and bytes of each worker: in a step, a start, an evaluation and a snapshot, by counting.

    python benchmarks/traffic.py [--workers 2,3,4,8,16,32] [--shape 2x64] [--strategies "ddp exact" ...]
                                 [--sample_tokens N] [--resume]

The trainer runs in workers forked after one import of torch, which take each other for workers of other
nodes. torch's profiler names every collective of gloo, in every thread, with its number of elements and their
type; the kernel counts the bytes of every socket. These are counts, not seconds: they do not depend on how
busy a machine is, but for the heartbeats of a start, an evaluation and a snapshot. What a worker sends of n
bytes that it gives to a collective of W:

    all_to_all   n (W - 1) / W     its own part stays; where parts differ in size, on average over the workers
    all_gather   n (W - 1)         each passes on what it gets, in a ring
    all_reduce   2 n (W - 1) / W   a ring; also FSDP2's own reduce-scatter, which gloo does as an all-reduce
    broadcast    n (W - 1) / W     on average over the workers

`sent` is that sum, `wire` what the sockets between workers have sent, `store` what those to the store have
sent and received. `asked` is what `python -m mingpt plan` computes for a step, `ring` what an all-reduce of
the gradient sends: 2 (W - 1) / W x 4 bytes x parameters. Figures are means over the workers; `largest` is
that of the worker that sends most; calls are those of the first worker. One row per strategy, optimizer and
number of workers, as JSON. Then the buckets of GPT-2 XL.
"""

import argparse
import itertools
import json
import math
import os
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import row
from one_hash import train_forked

from mingpt.base import events
from mingpt.config import Config
from mingpt.config.cli import build, parse
from mingpt.distributed import shared_memory
from mingpt.tools.jobs import ROOT

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp exact": {},
    "ddp fast": {"trainer.reduction": "fast"},
    "ddp exact, sharded optimizer": {"trainer.shard_optimizer": True},
    "fsdp exact": {"trainer.parallel": "fsdp"},
    "fsdp fast": {"trainer.parallel": "fsdp", "trainer.reduction": "fast"},
}
SETTINGS: dict[str, Any] = {
    "data.path": str(ROOT / "data/input.txt"), "data.block_size": 16, "model.arch": "modern",
    "trainer.micro_batch_size": 1, "trainer.max_steps": 4, "trainer.eval_every": 4,
    "trainer.eval_at_start": False, "trainer.log_every": 100, "trainer.sample_tokens": 0,
    "trainer.dtype": "float32", "trainer.device": "cpu", "trainer.timeout_s": 600,
    "snapshot.every": 1000, "snapshot.memory_every": 0,
}  # fmt: skip
COUNTED_STEP = 2  # DistributedDataParallel arranges its buckets after the first
BYTES = {
    "float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "c10::BFloat16": 2, "bool": 1,
}  # fmt: skip
PREFIX = "gloo:"
OLD_BUCKET_BYTES = 8 << 20  # a parameter that did not fit began a bucket
GIVEN, CALLS = "given", "calls"
ACKED_AT = 120  # offset of tcpi_bytes_acked, and behind it tcpi_bytes_received, in Linux's struct tcp_info


class Recorder:
    """Counts the collectives of one worker by phase; writes them to `path` at the end of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.phases: dict[str, dict[str, Any]] = {}
        self.phase = ""
        self.profile: Any = None
        self.before = Sockets()

    def begin(self, phase: str) -> None:
        """Also the end of the phase before."""
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        self.end()
        self.phase, self.before = phase, Sockets.now()
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
        after = Sockets.now()
        self.phases[self.phase] = {
            CALLS: calls,
            GIVEN: given,
            "wire": after.sent - self.before.sent,
            "store": after.store - self.before.store,
            "peers": after.peers,
        }
        self.profile = None

    def end_start(self, strategy: Any) -> None:
        self.end()
        rendezvous = strategy.context.rendezvous
        self.phases["start"]["keys"] = rendezvous.process_group_store.num_keys()

    def on_step(self, step: int) -> None:
        if step == COUNTED_STEP:
            self.begin("step")

    def on_save(self, kind: str, step: int) -> None:
        if kind == "disk":
            self.begin("snapshot")

    def write(self, **_: Any) -> None:
        self.end()
        self.path.write_text(json.dumps(self.phases))


@dataclass(frozen=True)
class Sockets:
    """Of this process: bytes since they were opened, and how many lead to other workers."""

    sent: int = 0  # to other workers
    store: int = 0  # to and from the store
    peers: int = 0

    @classmethod
    def now(cls) -> "Sockets":
        store_port = int(os.environ["MASTER_PORT"])
        sent = store = peers = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as one:
                    ports = one.getsockname()[1], one.getpeername()[1]
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED_AT + 16)
            except (OSError, IndexError):
                continue  # no connection by TCP
            acked, received = struct.unpack_from("QQ", info, ACKED_AT)
            if ports[1] == store_port:
                store += acked + received
            elif ports[0] != store_port:
                sent, peers = sent + acked, peers + 1
        return cls(sent, store, peers)


def subscribe(folders: list[Path]) -> None:
    """For workers that are forked from here on; each run's counts go to the last folder of its time."""
    recorders: list[Recorder] = []

    def start(launch: Any) -> None:
        shared_memory.node = lambda: f"of worker {launch.rank} alone"  # what workers of one share is not sent
        recorders.append(Recorder(folders[-1] / f"{launch.rank}.json"))
        recorders[0].begin("start")

    events.subscribe("worker_start", start)
    events.subscribe("run_start", lambda state, strategy: recorders[0].end_start(strategy))
    events.subscribe("step_start", lambda step: recorders[0].on_step(step))
    events.subscribe("step_end", lambda **_: recorders[0].end())
    events.subscribe("evaluation_start", lambda **_: recorders[0].begin("evaluation"))
    events.subscribe("save_start", lambda kind, step: recorders[0].on_save(kind, step))
    events.subscribe("run_end", lambda **_: recorders[0].write())


def sent_bytes(given: dict[str, int], workers: int) -> dict[str, float]:
    """By kind, of what a worker gives to collectives of so many workers."""
    rest = (workers - 1) / workers
    factors = {"all_to_all": rest, "all_gather": workers - 1, "all_reduce": 2 * rest, "broadcast": rest}
    return {kind: size * factors[kind] for kind, size in given.items()}


def summary(phases: Sequence[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Of a phase, as each worker counted it: calls of the first worker, bytes as means over all.

    `messages` are those that gloo sends at least: in a ring, and all to all, W - 1 a round.
    """
    by_worker = [sent_bytes(phase[GIVEN], workers) for phase in phases]
    totals = [sum(sent.values()) for sent in by_worker]
    calls, rounds = phases[0][CALLS], {"all_to_all": 1, "all_gather": 1, "all_reduce": 2}
    messages = sum(rounds.get(kind, 0) * (workers - 1) * count for kind, count in calls.items())
    return {
        CALLS: calls,
        "messages": messages,
        "sent": round(sum(totals) / workers),
        "largest": round(max(totals)),
        "wire": round(sum(phase["wire"] for phase in phases) / workers),
        "store": round(sum(phase["store"] for phase in phases) / workers),
        "peers": phases[0]["peers"],
        **({"keys": phases[0]["keys"]} if "keys" in phases[0] else {}),
    }


def asked_of_step(config: Config, workers: int) -> tuple[int, int]:
    """Bytes that a worker sends in a step by `python -m mingpt plan`, and the number of parameters."""
    from mingpt.tools.plan import Workload, bytes_sent, measure_data

    work = Workload(config, measure_data(config).vocab_size, workers, on_cpu=True, dtype="float32")
    return bytes_sent(work), work.parameters


def count(settings: dict[str, Any], workers: int, folder: Path) -> list[dict[str, dict[str, Any]]]:
    """The phases of each worker of a job."""
    train_forked(settings | {"run_dir": str(folder / "run")}, workers)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


def measure(strategy: str, settings: dict[str, Any], workers: int, folder: Path, resumes: bool) -> None:
    """Print the row of a configuration; with `resumes` also the start of a job that goes on with it."""
    phases = count(settings, workers, folder)
    found = {name: summary([phase[name] for phase in phases], workers) for name in phases[0]}
    if resumes:
        longer = {"trainer.max_steps": settings["trainer.max_steps"] + 1, "snapshot.resume": "changed"}
        resumed = count(settings | longer, workers, folder)
        found["resume"] = summary([phase["start"] for phase in resumed], workers)
    config = build(settings)
    asked, parameters = asked_of_step(config, workers)
    micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
    row(
        strategy=strategy, optimizer=config.optimizer.name, workers=workers, parameters=parameters,
        micro_batches=micro_batches, rounds=-(-micro_batches // workers), asked=asked,
        over_asked=round(found["step"]["sent"] / asked, 4),
        ring=round(8 * parameters * (workers - 1) / workers), **found,
    )  # fmt: skip


def buckets_of_xl() -> None:
    """Print the collectives of exact reduction in a step of configs/gpt2-xl.yaml, before and now."""
    import torch

    from mingpt.model import parameter_shapes
    from mingpt.parallel.ddp import make_buckets

    config = parse([str(ROOT / "configs/gpt2-xl.yaml")])
    assert config.data.vocab_size
    shapes = parameter_shapes(
        config.model, vocab_size=config.data.vocab_size, block_size=config.data.block_size
    )
    weights = [torch.empty(shape, device="meta") for shape in shapes.values()]
    sizes = [sum(weights[number].nbytes for number in bucket) for bucket in make_buckets(weights)]
    before = old_buckets([weight.nbytes for weight in weights])
    row(
        model="gpt2-xl", tensors=len(weights), buckets=len(sizes), smallest_bytes=min(sizes),
        largest_bytes=max(sizes), collectives=2 * len(sizes), buckets_before=before,
        collectives_before=2 * before,
    )  # fmt: skip


def old_buckets(sizes: Sequence[int]) -> int:
    """How many there were when each held at most 8 MB, or one parameter."""
    buckets, size = 1, 0
    for added in reversed(sizes):
        if size and size + added > OLD_BUCKET_BYTES:
            buckets, size = buckets + 1, 0
        size += added
    return buckets


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--workers", default="2,3,4,8,16,32")
    parser.add_argument("--shape", default="2x64", help="layers x width, of heads of 32")
    parser.add_argument("--micro_batches", type=int, default=32, help="of a step")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
    parser.add_argument("--sample_tokens", type=int, default=0, help="of the evaluation")
    parser.add_argument("--resume", action="store_true", help="count also the start of a resume")
    arguments = parser.parse_args()
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401 - both imported once, before the forks

    layers, width = map(int, arguments.shape.split("x"))
    shape = {"model.n_layer": layers, "model.n_embd": width, "model.n_head": max(1, width // 32)}
    counts = [int(word) for word in arguments.workers.split(",")]
    cases = itertools.product(counts, arguments.optimizers, arguments.strategies)
    folders: list[Path] = []
    subscribe(folders)
    with tempfile.TemporaryDirectory() as name:
        for number, (workers, optimizer, strategy) in enumerate(cases):
            folders.append(Path(name) / str(number))
            folders[-1].mkdir()
            chosen: dict[str, Any] = {
                "optimizer.name": optimizer,
                "trainer.batch_size": arguments.micro_batches,
            }
            chosen["trainer.sample_tokens"] = arguments.sample_tokens
            settings = SETTINGS | shape | chosen | STRATEGIES[strategy]
            measure(strategy, settings, workers, folders[-1], arguments.resume)
    buckets_of_xl()
    return 0


if __name__ == "__main__":
    sys.exit(main())
