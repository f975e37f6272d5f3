"""Lesson 9: DistributedDataParallel by hand. Buckets of gradients are sent while others are being computed.

    torchrun --standalone --nproc_per_node=2 -m tutorial.9_ddp

Options: --torch takes PyTorch's own. --micro_batches 2 sends after the second, and with --no_no_sync after
each. --link_mb_per_s 20 declares a slow network, and --no_overlap sends after the backward pass.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorial import common

BUCKET_BYTES = 64 * 1024  # DDP's default is 25 MiB, and this model would fit into one bucket


class Reducer:
    """Replaces gradients by their mean over the ranks, bucket by bucket, during the backward pass."""

    def __init__(self, parameters: list[nn.Parameter], overlap: bool, link_mb_per_s: float) -> None:
        self.overlap, self.sync = overlap, True
        self.link_bytes_per_s, self.link_free_at = 1e6 * link_mb_per_s, 0.0
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(parameters):  # the backward pass comes to the last ones first
            if sum(other.nbytes for other in self.buckets[-1]) >= BUCKET_BYTES:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                dist.broadcast(parameter.detach(), src=0)  # all ranks begin with rank 0's weights
                parameter.register_post_accumulate_grad_hook(functools.partial(self.on_grad_ready, number))
        self.start_step()

    def start_step(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients, by bucket
        self.sent: list[tuple[Tensor, dist.Work, float]] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank, and nothing is sent."""
        self.sync = False
        yield
        self.sync = True

    def on_grad_ready(self, bucket: int, _: Tensor) -> None:
        """The hook of every parameter: the backward pass calls it when the gradient is in .grad."""
        if self.sync:
            self.missing[bucket] -= 1
            if self.overlap:
                self.send_full_buckets()

    def send_full_buckets(self) -> None:
        # By their numbers, not as they get full: all ranks must call the same collectives in the same order.
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            flat = common.join_gradients(self.buckets[len(self.sent)]) / dist.get_world_size()
            work = dist.all_reduce(flat, async_op=True)  # returns at once; threads of gloo do it
            begin = max(time.perf_counter(), self.link_free_at)  # the declared link sends one after the other
            self.link_free_at = begin + 2 * common.ring_bytes(flat) / self.link_bytes_per_s
            self.sent.append((flat, work, self.link_free_at))

    def finish(self) -> list[Tensor]:
        """Wait for all buckets, and copy their means into the gradients. Returns the buckets."""
        self.send_full_buckets()
        for bucket, (flat, work, arrives_at) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            time.sleep(max(0.0, arrives_at - time.perf_counter()))  # nothing, without a declared link
            means = flat.split([parameter.numel() for parameter in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad = mean.view_as(parameter).clone()
        buckets = [flat for flat, _, _ in self.sent]
        self.start_step()
        return buckets


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--torch", "--no_no_sync", "--no_overlap"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--link_mb_per_s", type=float, default=float("inf"))
    args = parser.parse_args()
    dataset, gpt = common.start()
    if args.torch:
        static_graph = args.micro_batches == 1  # in its first step no_sync would fail (torch 2.13)
        model = nn.parallel.DistributedDataParallel(
            gpt, bucket_cap_mb=BUCKET_BYTES / 2**20, gradient_as_bucket_view=True, static_graph=static_graph
        )
    else:
        reducer = Reducer(list(gpt.parameters()), not args.no_overlap, args.link_mb_per_s)
    no_sync = model.no_sync if args.torch else reducer.no_sync
    optimizer, meter = torch.optim.AdamW(gpt.parameters(), lr=common.LEARNING_RATE), common.Meter(gpt)
    for step in range(1, common.STEPS + 1):
        micro_batches, loss = common.windows_of(step).chunk(args.micro_batches), torch.zeros(())
        with meter.step(step):
            for number, windows in enumerate(micro_batches, start=1):
                sync = args.no_no_sync or number == len(micro_batches)
                with contextlib.nullcontext() if sync else no_sync():
                    _, mean = (model if args.torch else gpt)(*dataset[windows])
                    (mean / len(micro_batches)).backward()
                loss += mean.detach() / len(micro_batches)
                if sync and not args.torch:
                    meter.hold(buckets=reducer.finish())
            meter.hold(gradients=[parameter.grad for parameter in gpt.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        common.report_step(step, loss)
    meter.hold(weights=gpt.parameters(), optimizer_state=common.averages(optimizer))
    common.finish(meter, loss)


if __name__ == "__main__":
    main()
