"""The doctor's checks of the network: addresses of this host, connections, clocks, an all-reduce.

Workers pass values over the launcher's store, under a name that each generation makes anew; each wait for a
value has a limit.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mingpt.base.system import ipv4_addresses, run_within
from mingpt.distributed.exit import first_line

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT_S = 3.0
ACCEPT_BACKLOG = 1024
MAX_THREADS = 256
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
CLOCK_ROUNDS, CLOCK_EVERY_S, CLOCK_WAIT_S = 5, 0.1, 10.0
GROUP_TIMEOUT_S = 8.0
ALL_REDUCE_FLOATS, ALL_REDUCE_ROUNDS = 1 << 20, 7


def networks() -> dict[str, str]:
    """Return {interface: first IPv4 address, as "10.0.0.2/24"}; {} where the system has no list of them."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # not on Linux
        for name, address in ipv4_addresses():
            found.setdefault(name, address.with_prefixlen)
    return found


def gloo_address(interfaces: Mapping[str, str]) -> str:
    """Return the address on which gloo will listen. `interfaces` is the result of `networks`.

    It is that of the first interface in GLOO_SOCKET_IFNAME; without that variable, the first address of the
    host name that belongs to this host, else 127.0.0.1 (torch's ProcessGroupGloo, createDefaultDevice).
    Raises OSError if the named interface has no IPv4 address.
    """
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    if name in interfaces:
        return interfaces[name].partition("/")[0]
    if name:
        there = ", ".join(f"{one} ({address})" for one, address in interfaces.items())
        raise OSError(
            f"{INTERFACE_VARIABLE}={name} names no interface with an IPv4 address; there are {there}"
        )
    return named_address() or "127.0.0.1"


def named_address() -> str | None:
    """Return the first address of this host's name that belongs to this host; None if there is none."""
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        resolved = []
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue  # the address is another host's
            return str(address[0])
    return None


def listen(address: str) -> int:
    """Listen at `address` until this process ends; return the port that the kernel chose. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=ACCEPT_BACKLOG)
    port = int(server.getsockname()[1])
    server.detach()  # so that the socket stays open when this function ends
    return port


def connect(host: str, port: int) -> socket.socket:
    """Return a TCP connection; connecting and each read may take CONNECT_S. Raises OSError with a reason."""
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise OSError(why_not(error)) from None


def why_not(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve: {error.strerror}"
    return (error.strerror or str(error)).lower()


def find_unreachable(targets: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Connect to all `targets`, {rank: (address, port)}, in parallel; return {rank: reason} of failures."""

    def failure(target: tuple[str, int]) -> str | None:
        try:
            connect(*target).close()
        except OSError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(MAX_THREADS) as pool:
        results = dict(zip(targets, pool.map(failure, targets.values()), strict=True))
    return {rank: reason for rank, reason in results.items() if reason is not None}


class Exchange:
    """Passes values between workers: each puts a value in the store as JSON, under a name and its rank."""

    def __init__(self, store: "Store", rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def put(self, name: str, value: Any) -> None:
        self.store.set(f"doctor/{name}/{self.rank}", json.dumps(value))

    def get(self, name: str, rank: int, timeout_s: float) -> Any:
        """Return the value that `rank` has put under `name`; None if it does not come within `timeout_s`.

        A value that is already there is returned even if `timeout_s` is 0 or less. None if the store fails.
        """
        from torch.distributed import DistError

        key = f"doctor/{name}/{rank}"
        try:
            if not self.store.check([key]):  # a wait of 1 ms fails if the store's host is only slow
                self.store.wait([key], timedelta(seconds=max(0.001, timeout_s)))
            return json.loads(self.store.get(key))
        except DistError:
            return None

    def get_all(self, name: str, timeout_s: float) -> dict[int, Any]:
        """Return {rank: value} of all ranks, this one included, whose values come within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        values = {rank: self.get(name, rank, deadline - time.monotonic()) for rank in range(self.world_size)}
        return {rank: value for rank, value in values.items() if value is not None}

    def clock_offset_s(self) -> float | None:
        """Return the seconds by which this clock is ahead of rank 0's; None if rank 0 is silent. Collective.

        The result is the least of several differences, each of which includes the time that a message takes.
        Rank 0 pauses before each message, so that the others are waiting for it. Call this once: its keys
        stay in the store.
        """
        offsets = []
        for number in range(CLOCK_ROUNDS):
            if self.rank == 0:
                time.sleep(CLOCK_EVERY_S)
                self.put(f"clock/{number}", time.time())
            sent_at = self.get(f"clock/{number}", 0, CLOCK_WAIT_S)
            if sent_at is None:
                return None
            offsets.append(time.time() - sent_at)
        return float(min(offsets))


def measure_all_reduce(exchange: Exchange, gpu: int | None) -> tuple[float | None, str | None]:
    """Return (MB/s of an all-reduce, None), or (None, a line on why it failed or hung). Collective.

    It makes a process group that stays: NCCL if `gpu`, a device's index, is given, gloo on the CPU if None.
    """
    try:
        return run_within(2 * GROUP_TIMEOUT_S, lambda: all_reduce_rate(exchange, gpu)), None
    except Exception as error:  # a backend raises exceptions of many kinds, and any is an answer
        return None, first_line(error)


def all_reduce_rate(exchange: Exchange, gpu: int | None) -> float:
    import torch
    from torch import distributed

    device = "cpu" if gpu is None else f"cuda:{gpu}"
    if gpu is not None:
        torch.cuda.set_device(gpu)  # the device is set per thread
    distributed.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=distributed.PrefixStore("group", exchange.store),
        rank=exchange.rank,
        world_size=exchange.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    values = torch.ones(ALL_REDUCE_FLOATS, device=device)
    took_s = []
    for _ in range(ALL_REDUCE_ROUNDS):  # the first ones are slow
        began = time.monotonic()
        distributed.all_reduce(values)
        values[-1].item()  # waits for a GPU
        took_s.append(time.monotonic() - began)
    return float(values.nbytes / 1e6 / min(took_s))
