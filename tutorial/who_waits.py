"""Record when gradients and weights are sent under DDP and FSDP2, on a link that is declared slow.

    torchrun --standalone --nproc_per_node=2 -m tutorial.who_waits --mode overlap --events out/overlap.json

--mode is overlap (DDP, small buckets), one_bucket, no_sync, or fsdp. Declared, so that there is something to
see: the link carries LINK_MB_PER_S, and a block takes 10 ms more forward and 20 ms more backward.
"""

import argparse
import contextlib
import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tutorial.common import LEARNING_RATE, start, windows_of
from tutorial.events import EVENTS, add, record, save
from tutorial.splitting import finish

LINK_MB_PER_S, STEPS, BUCKET_MB = 5.0, 5, 0.064
TITLES = {
    "overlap": "DDP, buckets of 64 kB: sent while the backward pass goes on",
    "one_bucket": "DDP, one bucket: sent when the backward pass is over",
    "no_sync": "DDP, two micro-batches, no_sync in the first: sent once",
    "fsdp": "FSDP2: weights are gathered before each block's passes, and awaited",
}


def carry(transfers: queue.Queue[Any]) -> None:
    """The link: one transfer after the other, at the declared rate."""
    while True:
        begin, name, work, tensor, future = transfers.get()
        work.wait()
        begin = max(begin, time.monotonic())
        time.sleep(tensor.nbytes / (1e6 * LINK_MB_PER_S))
        add("send", name, begin, time.monotonic())
        future.set_result(tensor)


def average(transfers: queue.Queue[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each bucket that is full, in the backward pass."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    name, begin = f"bucket {bucket.index() + 1}", time.monotonic()
    transfers.put((begin, name, dist.all_reduce(tensor, async_op=True), tensor, future))
    if bucket.is_last():
        add("compute", "backward ends", begin, begin)
    return future


class Collective:
    """An all-gather or reduce-scatter for fully_shard. On the CPU it is awaited where it is called."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> None:
        options.pop("async_op", None)
        begin = time.monotonic()
        with record("wait", self.name):
            self.function(output_tensor, input_tensor, group=group, **options)
            time.sleep(max(output_tensor.nbytes, input_tensor.nbytes) / 2e6 / LINK_MB_PER_S)
        add("send", self.name, begin, time.monotonic())


def shard(gpt: Any) -> Any:
    for name, unit in (("block 1", gpt.h[0]), ("block 2", gpt.h[1]), ("rest", gpt)):
        fully_shard(unit)
        unit.set_custom_all_gather(Collective(name, dist.all_gather_into_tensor))
        unit.set_custom_reduce_scatter(Collective(name, dist.reduce_scatter_tensor))
    return gpt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=list(TITLES), required=True)
    parser.add_argument("--events", required=True, help="a file for the events of the last step")
    args, transfers = parser.parse_args(), queue.Queue[Any]()
    dataset, gpt = start()
    for block in gpt.h:
        block.register_forward_hook(lambda *_: time.sleep(0.010))
        block.register_full_backward_hook(lambda *_: time.sleep(0.020))
    model = shard(gpt) if args.mode == "fsdp" else None
    if model is None:
        model = DistributedDataParallel(gpt, bucket_cap_mb=BUCKET_MB if args.mode == "overlap" else 25)
        threading.Thread(target=carry, args=(transfers,), daemon=True).start()
        model.register_comm_hook(transfers, average)
    count, optimizer = 1 + (args.mode == "no_sync"), torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)
    for step in range(1, STEPS + 1):
        dist.barrier()  # both begin at once
        EVENTS.clear()
        optimizer.zero_grad()
        for number, part in enumerate(windows_of(step).chunk(count), start=1):
            with contextlib.nullcontext() if number == count else model.no_sync():
                with record("compute", f"forward {number}"):
                    _, loss = model(*dataset[part])
                begin = time.monotonic()
                (loss / count).backward()
            ends = [event["end"] for event in EVENTS if event["name"] == "backward ends"]
            add("compute", f"backward {number}", begin, ends[0] if ends else time.monotonic())
            if ends:
                add("wait", "gradients", ends[0], time.monotonic())
        with record("compute", "optimizer"):
            optimizer.step()
    EVENTS[:] = [event for event in EVENTS if event["name"] != "backward ends"]
    save(args.events, TITLES[args.mode])
    finish(f"rank {dist.get_rank()} has recorded {len(EVENTS)} events", None)


if __name__ == "__main__":
    main()
