"""Find out why a cluster does not start, or which of its links are slow.

    torchrun ... -m mingpt doctor [CONFIG.yaml] [section.key=value ...]

Start the doctor with the flags and settings of the run. It prints what each node has, and one sentence per
fault. If all workers answer, it also prints the rate at which each node receives data from each other node.
Exit code 0: no fault; 1: faults (torchrun does not restart the workers), or a worker did not arrive; 2: a
mistake on the command line (torchrun itself exits with 1).
train.py itself checks, when it starts, whether the workers' settings differ, and whether token shards and
folders can be used.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import socketserver
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import NonRetryableError, PeersMissing, UserError
from mingpt.base.system import ipv4_addresses, run_within, start
from mingpt.config import Config
from mingpt.config.cli import parse
from mingpt.distributed import Launch, ProcessExit
from mingpt.distributed.exit import first_line
from mingpt.distributed.rendezvous import Rendezvous

Facts = dict[str, Any]  # {name: value}: what `find_facts` found on one worker; it can be written as JSON
MEET_S, FACTS_S, ANSWER_S = 20.0, 15.0, 60.0  # limits of the rendezvous, of finding facts, of an answer
CONNECT_S, GROUP_S = 2.0, 8.0  # limits of a connection and of a collective
LINK_S = 0.4  # for how long a link is measured
CHUNK = bytes(1 << 20)
SLOW = 0.25  # share of the usual rate below which a link is slow
MAX_CLOCK_S = 1.0
# {name of a fact: what to do on a node where its value differs from that of most nodes; "": it may differ}
ADVICE = {
    "host": "",
    "device": "look at CUDA_VISIBLE_DEVICES and the driver, take equal nodes, or set trainer.device=cpu",
    "program": "install the same code and torch there, because other code may compute other bits",
    "threads": "set OMP_NUM_THREADS there, because the bits of a result depend on it",
    "Python": "",
}


def main(arguments: Sequence[str]) -> NoReturn:
    """Examine all workers, then exit this process; a fault ends the job without restarts. Collective."""
    settings = CommandParser("python -m mingpt doctor", __doc__).parse_known_args(arguments)[1]
    launch = Launch.from_environment()
    process_exit = ProcessExit(launch)
    try:
        examine(launch, parse(settings))
    except Exception as error:  # the next generation would meet the same error
        what = NonRetryableError(f"worker {launch.rank} on {platform.node()}: {first_line(error)}")
        process_exit.exit_process(error if isinstance(error, (UserError, PeersMissing)) else what)
    process_exit.exit_process()


def examine(launch: Launch, config: Config) -> None:
    """Examine all workers; the lowest rank that answers prints a report. Collective.

    Raises NonRetryableError if there are faults.
    """
    from torch.distributed import HashStore

    store = Rendezvous(launch, MEET_S).process_group_store if launch.is_distributed else HashStore()
    clock = time.time()  # all workers have met just now
    facts = run_within(FACTS_S, lambda: find_facts(launch, config)) | {"clock": clock}
    workers = all_gather(store, launch, "facts", facts)
    if None not in workers:
        links_s = sum(LINK_S + CONNECT_S * len(there["addresses"]) for there in workers if there["port"])
        facts["links"] = receive_from_all(launch.rank, workers)
        workers = all_gather(store, launch, "links", facts, ANSWER_S + links_s)
    rows, faults = find_faults(workers)
    if not faults:
        facts["problem"] = try_backend(store, launch, config)
        rows, faults = find_faults(all_gather(store, launch, "backend", facts))
    if launch.rank == next(rank for rank, there in enumerate(workers) if there is not None):
        write_lines(
            textwrap.fill(line, 80, subsequent_indent="         ", break_on_hyphens=False)
            for line in [*rows, "", *(faults or ["no fault found"])]
        )
    with contextlib.suppress(Exception):  # rank 0, which may host the store, may have left
        all_gather(store, launch, "done", True)
    if faults:
        raise NonRetryableError(f"faults found: {len(faults)}")


def all_gather(store: Any, launch: Launch, name: str, value: Any, limit_s: float = ANSWER_S) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. Collective.

    The value is None for a rank that does not answer within `limit_s` seconds. Values travel as JSON through
    `store`, torch's TCPStore or HashStore. Each `name` may be used only once.
    """
    store.set(f"{name}/{launch.rank}", json.dumps(value))
    values, deadline = [], time.monotonic() + limit_s
    for rank in range(launch.world_size):
        key, left_s = f"{name}/{rank}", max(0.1, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left_s))
            values.append(json.loads(store.get(key)))
        except RuntimeError:  # of torch.distributed
            values.append(None)
    return values


def find_facts(launch: Launch, config: Config) -> Facts:
    """Return this worker's facts; start a ZeroServer, from which other nodes receive data to measure links.

    The fact `port` is the server's port on the first worker of each node, and 0 on the other workers.
    """
    from mingpt.distributed import device as devices

    problem, device, cpu = devices.idle_gpus(config.trainer.device, launch) or "", "", ""
    with contextlib.suppress(OSError):  # not on Linux
        cpu = "".join(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1])
    try:
        devices.check_gloo()
        found = devices.find_device(config.trainer.device, launch)
        facts = devices.gpu_facts(found) or {devices.device_name(found): cpu}
        device = ", ".join(f"{name} {value}" for name, value in facts.items())
    except UserError as error:
        problem = str(error)
    addresses = find_addresses()
    disk, memory = free_gb(config.run_dir), free_gb(config.snapshot.memory_path)
    server = ZeroServer(("", 0), socketserver.BaseRequestHandler)
    start(server.serve_forever)
    return {
        "name": platform.node(),
        "host": f"{' '.join(next(iter(addresses.items())))}; workers: {launch.local_world_size}, from "
        f"{launch.rank - launch.local_rank} on; free: {disk} GB for run_dir, {memory} GB "
        "for snapshots in memory",
        "device": device,
        "program": devices.find_program(),
        "threads": launch.threads(config.trainer.threads),
        "Python": platform.python_version(),
        "problem": problem,
        "addresses": addresses,
        "port": 0 if launch.local_rank else server.server_address[1],
    }


def find_addresses() -> dict[str, str]:
    """Return {interface: address} of this host; gloo will probably listen at the first address.

    gloo listens on the interface that GLOO_SOCKET_IFNAME names. If this variable is not set, the first key is
    "host name". An address that is not found is replaced by that of the host's name, or else by 127.0.0.1.
    """
    used, own, found = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], "127.0.0.1", {}
    with contextlib.suppress(OSError):  # not on Linux, or the name does not resolve
        found = {name: str(address.ip) for name, address in ipv4_addresses()}
        own = str(socket.getaddrinfo(platform.node(), None)[0][4][0])
    return {used or "host name": found.get(used, own)} | found


def free_gb(place: str) -> float:
    """Return the free GB of the disk on which `place` is, or will be."""
    while not os.path.exists(place):
        place = os.path.dirname(place) or "."
    return round(shutil.disk_usage(place).free / 1e9, 1)


class ZeroServer(socketserver.ThreadingTCPServer):
    """Sends zeros to each client until the connection is closed."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                request.sendall(CHUNK)


def receive_from_all(rank: int, workers: list[Facts]) -> list[tuple[int, str, float]]:
    """Measure the link from each other node; return (rank of the sender, problem, MB/s) for each link.

    `workers` has the facts of each worker. Only the first worker of a node measures; other workers return [].
    `problem` is as in `receive_from`. Each node begins with a different sender, so that the nodes do not all
    receive from the same sender.
    """
    nodes = [number for number, there in enumerate(workers) if there["port"]]
    if rank not in nodes:
        return []
    own, links = nodes.index(rank), []
    addresses = set(workers[rank]["addresses"].values())
    for sender in nodes[own + 1 :] + nodes[:own]:
        links.append((sender, *receive_from(workers[sender], addresses)))
    return links


def receive_from(there: Facts, own: Collection[str] = ()) -> tuple[str, float]:
    """Measure the link from another node, whose facts are `there`; return (problem, MB/s).

    First the address at which gloo listens on that node is tried. If this address fails, the node's other
    addresses are tried until one answers, except addresses in `own`, the addresses of this node. The problem
    says what failed and what to do; "" if nothing failed.
    """
    problem, first = "", next(iter(there["addresses"].values()))
    for interface, address in there["addresses"].items():
        if problem and (address in own or address == first):
            continue
        try:
            mb_s = receive_mb_s(address, there["port"])
        except OSError as error:
            problem = problem or f"{address} ({interface}): {error.strerror or 'no answer'}"
        else:
            return (
                problem
                and f"{problem}; {address} can be reached: set GLOO_SOCKET_IFNAME={interface} (and "
                "NCCL_SOCKET_IFNAME) there"
            ), mb_s
    return f"{problem}; let TCP ports 32768-60999 in through the firewall there, or look at the MTU", 0.0


def receive_mb_s(address: str, port: int) -> float:
    """Return the MB/s that arrive from the ZeroServer at `address`.

    Raises OSError if the connection fails, or if no data arrive for CONNECT_S seconds. Returns 0.0 if the
    server closes the connection without sending anything.
    """
    buffer, received = bytearray(CHUNK), 0
    with socket.create_connection((address, port), CONNECT_S) as connection:
        began = time.monotonic()
        while time.monotonic() < began + LINK_S:
            received += connection.recv_into(buffer)
        return received / 1e6 / (time.monotonic() - began)


def try_backend(store: Any, launch: Launch, config: Config) -> str:
    """Connect all workers with NCCL, or with gloo on CPUs, as training does. Collective.

    Returns a text that says why the connection failed and what to do; "" if it did not fail.
    """
    from torch import distributed

    from mingpt.distributed.device import find_device

    def compute() -> None:
        device = find_device(config.trainer.device, launch)
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend, None, timedelta(seconds=GROUP_S), launch.world_size, launch.rank, store
        )
        distributed.all_gather_object([None] * launch.world_size, "on the current device")

    try:
        run_within(2 * GROUP_S, compute)
    except Exception as error:  # a backend raises exceptions of many kinds, and any is an answer
        return (
            f"the workers cannot compute together ({first_line(error)}): remove the cause, set "
            "NCCL_SOCKET_IFNAME as GLOO_SOCKET_IFNAME, or set trainer.device=cpu"
        )
    return ""


def find_faults(answers: Sequence[Facts | None]) -> tuple[list[str], list[str]]:
    """Return (lines about the facts and links, sentences that name each fault, its nodes and what to do).

    `answers` has the facts of each worker, in the order of the ranks; None for a worker that did not answer.
    For a fact on which ADVICE has advice, the right value is the value that most nodes have. If two values
    are on equally many nodes, the value of the lower rank is right. A different value is a fault. Empty
    values are ignored.
    """
    workers = [there for there in answers if there is not None]
    rows, first = [], workers[0]
    found = [
        (f"worker {rank}", f" did not answer within {ANSWER_S:g} s: look at its own output")
        for rank, there in enumerate(answers)
        if there is None
    ]
    for fact, advice in ADVICE.items():
        values = group((there["name"], there[fact]) for there in workers if fact != "host" or there["port"])
        rows += [f"{fact:9}{', '.join(nodes)}: {value or '-'}" for value, nodes in values.items()]
        usual, *others = sorted(values, key=lambda value: (not value, -len(values[value]))) or [""]
        for value in others:
            if advice and value:
                found += [
                    (name, f": {fact} is {value}, on the others {usual}: {advice}") for name in values[value]
                ]
    links = [(there["name"], *link) for there in workers for link in there.get("links", ())]
    rates = sorted([0.0, *(mb_s for *_, mb_s in links)])
    usual_mb_s = rates[3 * len(rates) // 4]
    for name, sender, problem, mb_s in links:
        other = workers[sender]["name"]
        rows.append(f"MB/s     {name} receives {mb_s:,.1f} from {other}")
        if problem:
            found.append((name, f" cannot connect to {other} at {problem}"))
        elif mb_s <= SLOW * usual_mb_s:
            found.append(
                (
                    name,
                    f" receives {mb_s:,.1f} MB/s from {other}, and {usual_mb_s:,.1f} are usual: look at the "
                    "network cards, the cables and the MTU of both",
                )
            )
    for there in workers:
        lead_s = there["clock"] - first["clock"]
        if there["problem"]:
            found.append((there["name"], f": {there['problem']}"))
        if abs(lead_s) > MAX_CLOCK_S:
            found.append(
                (there["name"], f": the clock is {lead_s:+.1f} s off {first['name']}'s: have NTP set it")
            )
    return rows, [f"fault:   {' and '.join(nodes)}{text}" for text, nodes in group(found).items()]


def group(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group pairs (node, value) by value; return {value: the nodes that have this value, without repeats}."""
    found: dict[str, list[str]] = {}
    for node, value in dict.fromkeys(pairs):
        found.setdefault(value, []).append(node)
    return found
