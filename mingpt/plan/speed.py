"""An estimate of the time per step from rates: known ones of a GPU, or those measured here by `--measure`."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mingpt.plan.memory import gradient, weights
from mingpt.plan.traffic import bytes_sent
from mingpt.plan.workload import FLOAT_BYTES, Workload
from mingpt.report.metrics import PEAK_FLOPS

GPU_UTILIZATION = 0.35  # of the peak; nanoGPT reaches 33 % on an H100, llm.c 40 %
OPTIMIZER_PASSES = 3  # over weights, gradients and state: reading, writing, the norm
COPY_BYTES = 64 << 20
REDUCE_BYTES = 32 << 20
REPEATS = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Rates:
    """Of one worker. None where a rate is not known: its part is left out."""

    flops_per_s: float
    copied_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None


def known_rates(gpu: str) -> Rates | None:
    """Those of a GPU, by a part of its name; None for one that is not known."""
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name.lower() in gpu.lower()]
    return Rates(GPU_UTILIZATION * peaks[0]) if peaks else None


def step_seconds(work: Workload, rates: Rates) -> float:
    """Computing, updating and sending, one after the other: what overlaps takes less."""
    flops = work.flops_per_step * (4 / 3 if work.config.trainer.recompute == "block" else 1)
    seconds = flops / work.workers / rates.flops_per_s
    if rates.copied_bytes_per_s:
        updated = weights(work) + gradient(work) + FLOAT_BYTES * work.optimizer_elements * work.first_share
        seconds += OPTIMIZER_PASSES * updated / rates.copied_bytes_per_s
    if rates.sent_bytes_per_s:
        seconds += bytes_sent(work) / rates.sent_bytes_per_s
    return seconds


def measure_rates(work: Workload) -> Rates:
    """On this machine's CPU, with trainer.threads threads; a few seconds."""
    torch.set_num_threads(work.config.trainer.threads)
    return Rates(measure_products(work), measure_copies(), measure_all_reduce() if work.workers > 1 else None)


def best_seconds(run: Callable[[], object]) -> float:
    """Of several runs, after one that is not counted."""
    run()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure_products(work: Workload) -> float:
    """FLOP/s of the MLP's two products and their four gradients, the largest of a block."""
    width = work.config.model.n_embd
    dtype = getattr(torch, work.dtype)
    x = torch.randn(work.tokens_per_micro_batch, width, dtype=dtype)
    up, down = torch.randn(4 * width, width, dtype=dtype), torch.randn(width, 4 * width, dtype=dtype)

    def products() -> None:
        wide = x @ up.T
        narrow = wide @ down.T
        grad_wide = narrow @ down
        _ = narrow.T @ wide, grad_wide @ up, grad_wide.T @ x

    return 12.0 * x.numel() * 4 * width / best_seconds(products)


def measure_copies() -> float:
    """Bytes per second of a copy from memory to memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return COPY_BYTES / best_seconds(lambda: target.copy_(source))


def measure_all_reduce() -> float:
    """Bytes that each of two processes on this machine sends per second in gloo's all-reduce."""
    with tempfile.TemporaryDirectory() as name:
        spawn = multiprocessing.get_context("spawn")
        receiver, sender = spawn.Pipe(duplex=False)
        peers = [spawn.Process(target=all_reduce, args=(rank, name, sender)) for rank in range(2)]
        for peer in peers:
            peer.start()
        is_there = receiver.poll(TIMEOUT_S)
        seconds: float = receiver.recv() if is_there else float("nan")
        for peer in peers:
            peer.join(TIMEOUT_S)
    return REDUCE_BYTES / seconds


def all_reduce(rank: int, folder: str, sender: "multiprocessing.connection.Connection") -> None:
    """What each of the two does; a ring's all-reduce of n bytes between two sends n from each."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    values = torch.zeros(REDUCE_BYTES // FLOAT_BYTES)
    seconds = best_seconds(lambda: dist.all_reduce(values))
    if rank == 0:
        sender.send(seconds)
    dist.destroy_process_group()
