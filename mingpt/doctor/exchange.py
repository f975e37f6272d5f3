"""What the workers tell each other over the launcher's store, before and without a process group.

All keys stand under the generation's name, which Rendezvous makes fresh, and every wait has a limit.
"""

import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

CLOCK_ROUNDS, CLOCK_WAIT_S = 5, 10.0
GROUP_TIMEOUT_S = 8.0
ALL_REDUCE_FLOATS, ALL_REDUCE_ROUNDS, WARM_UPS = 1 << 20, 5, 2


class Exchange:
    """One worker's view of the store."""

    def __init__(self, store: "Store", rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def put(self, name: str, value: Any) -> None:
        self.store.set(f"doctor/{name}/{self.rank}", json.dumps(value))

    def get(self, name: str, rank: int, timeout_s: float) -> Any:
        """Another's value; None if it does not come. What is there is found however short the limit is."""
        from torch.distributed import DistError

        key = f"doctor/{name}/{rank}"
        try:
            if not self.store.check([key]):  # a wait of no time fails where the store's host is only slow
                self.store.wait([key], timedelta(seconds=max(0.001, timeout_s)))
            return json.loads(self.store.get(key))
        except DistError:
            return None

    def get_all(self, name: str, timeout_s: float) -> dict[int, Any]:
        """{rank: value} of those that come within the time limit."""
        deadline = time.monotonic() + timeout_s
        values = {rank: self.get(name, rank, deadline - time.monotonic()) for rank in range(self.world_size)}
        return {rank: value for rank, value in values.items() if value is not None}

    def clock_offset_s(self) -> float | None:
        """How far this clock is ahead of rank 0's, by the quickest of some round trips (Cristian 1989).

        None if rank 0 does not answer. Rank 0 calls `serve_clock` meanwhile.
        """
        if self.rank == 0:
            return 0.0
        trips = []
        for number in range(CLOCK_ROUNDS):
            sent, began = time.time(), time.monotonic()
            self.put(f"clock_asked/{number}", True)
            there = self.get(f"clock/{self.rank}/{number}", 0, CLOCK_WAIT_S)
            took_s = time.monotonic() - began
            if there is None:
                return None
            trips.append((took_s, sent + took_s / 2 - there))
        return min(trips)[1]

    def serve_clock(self) -> None:
        """On rank 0: answer the others, one after the other."""
        for rank in range(1, self.world_size):
            for number in range(CLOCK_ROUNDS):
                asked = self.get(f"clock_asked/{number}", rank, CLOCK_WAIT_S)
                if asked is None:
                    break
                self.put(f"clock/{rank}/{number}", time.time())


def measure_all_reduce(exchange: Exchange, gpu: int | None) -> tuple[float | None, str | None]:
    """MB/s of an all-reduce in a process group of its own, or why there is none; of a GPU or by gloo.

    Collective.
    """
    results: list[tuple[float | None, str | None]] = []

    def work() -> None:
        try:
            results.append((all_reduce_rate(exchange, gpu), None))
        except Exception as error:  # a backend raises exceptions of many kinds; this is what is looked for
            results.append((None, (str(error).splitlines() or [""])[0][:200]))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * GROUP_TIMEOUT_S)
    return results[0] if results else (None, f"not done within {2 * GROUP_TIMEOUT_S:g} s")


def all_reduce_rate(exchange: Exchange, gpu: int | None) -> float:
    import torch
    from torch import distributed

    device = "cpu" if gpu is None else f"cuda:{gpu}"
    if gpu is not None:
        torch.cuda.set_device(gpu)  # of this thread
    distributed.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=distributed.PrefixStore("group", exchange.store),
        rank=exchange.rank,
        world_size=exchange.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    values = torch.ones(ALL_REDUCE_FLOATS, device=device)
    took_s = []
    for _ in range(WARM_UPS + ALL_REDUCE_ROUNDS):
        values.fill_(1.0)
        if gpu is not None:
            torch.cuda.synchronize()
        began = time.monotonic()
        distributed.all_reduce(values)
        total = values[-1].item()  # waits for a GPU
        took_s.append(time.monotonic() - began)
        if total != exchange.world_size:
            raise RuntimeError(f"an all-reduce of ones over {exchange.world_size} workers gives {total}")
    return float(values.nbytes / 1e6 / min(took_s[WARM_UPS:]))
