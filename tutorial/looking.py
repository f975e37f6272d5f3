"""A job of two ranks with something wrong in it, to look at. The page looking.md has a section for each.

    torchrun --standalone --nproc_per_node=2 -m tutorial.looking mismatch

Other words for mismatch: missing, profile, breakpoint, breakpoint_all, stuck. Collectives time out after 8 s.
"""

import argparse
import faulthandler
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

OUT, TIMEOUT_S = Path("out/tutorial"), 8.0


def mismatch(rank: int) -> None:
    """Two ranks call all_reduce, with tensors of different shapes."""
    total = torch.ones(3 + rank)
    dist.all_reduce(total)
    print(f"rank {rank}: the sum is {total.tolist()}", flush=True)


def missing(rank: int) -> None:
    """Rank 1 is busy elsewhere when rank 0 waits for all."""
    if rank == 1:
        time.sleep(TIMEOUT_S)
    dist.monitored_barrier(timeout=timedelta(seconds=2))


def profile(rank: int) -> None:
    """A trace of three steps of DDP by each rank, and both in one file."""
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024))
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            with torch.profiler.record_function("forward"):
                loss = model(torch.randn(512, 1024)).square().mean()
            with torch.profiler.record_function("backward"):
                loss.backward()
    OUT.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(OUT / f"trace-{rank}.json"))
    if rank == 0:
        for row in sorted(profiler.key_averages(), key=lambda row: -row.cpu_time_total)[:8]:
            print(f"{row.key[:44]:44} {row.count:4} calls {row.cpu_time_total / 1000:8.1f} ms")
    dist.barrier()  # until both files are there
    if rank == 0:
        events = []
        for number in range(2):
            trace = json.loads((OUT / f"trace-{number}.json").read_text())
            events += [{**event, "pid": f"rank {number}, {event['pid']}"} for event in trace["traceEvents"]]
        (OUT / "traces.json").write_text(json.dumps({**trace, "traceEvents": events}))
        print(f"both ranks in {OUT / 'traces.json'}", flush=True)


def one_breakpoint(rank: int) -> None:
    total = torch.tensor(float(rank))
    if rank == 0:
        breakpoint()
    dist.all_reduce(total)
    print(f"rank {rank}: the sum is {total.item():.0f}", flush=True)


def breakpoint_for_all(rank: int) -> None:
    total = torch.tensor(float(rank))
    dist.breakpoint(rank=0)
    dist.all_reduce(total)
    print(f"rank {rank}: the sum is {total.item():.0f}", flush=True)


def stuck(rank: int) -> None:
    """Rank 1 never comes to the collective in which rank 0 waits. Each writes its stacks at SIGUSR1."""
    OUT.mkdir(parents=True, exist_ok=True)
    file = (OUT / f"stacks-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file)
    faulthandler.dump_traceback_later(TIMEOUT_S / 2, file=file)
    print(f"rank {rank}: process {os.getpid()}", flush=True)
    while rank == 1:
        time.sleep(1)
    dist.all_reduce(torch.ones(1))


def main() -> None:
    problems = {
        "mismatch": mismatch,
        "missing": missing,
        "profile": profile,
        "breakpoint": one_breakpoint,
        "breakpoint_all": breakpoint_for_all,
        "stuck": stuck,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("problem", choices=list(problems))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    problems[parser.parse_args().problem](dist.get_rank())
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


if __name__ == "__main__":
    main()
