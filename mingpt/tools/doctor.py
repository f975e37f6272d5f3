"""Find out why a cluster does not start, or which of its nodes is slow.

    torchrun ... -m mingpt doctor [CONFIG.yaml] [section.key=value ...]

Start the doctor with the flags and settings of the run. It prints what each node has, and one sentence per
fault. If there is no fault, the workers connect as in training, and each of several nodes receives data from
another. Exit code 0: no fault; 1: faults (torchrun does not restart the workers), a missing worker, or any
other error; 2: a mistake of the user, such as a wrong setting (torchrun itself exits with 1).
train.py itself checks, when it starts, whether the workers' settings differ, and whether token shards and
folders can be used.
"""

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import NonRetryableError, PeersMissing, UserError
from mingpt.base.system import run_within
from mingpt.config import Config
from mingpt.config.cli import parse
from mingpt.distributed import Launch, ProcessExit
from mingpt.distributed.ends import list_workers
from mingpt.distributed.exit import first_line
from mingpt.distributed.group import wait_for
from mingpt.distributed.rendezvous import Rendezvous

Facts = dict[str, Any]  # {name: value}: what was found on one worker; it can be written as JSON
MEET_S, ANSWER_S = 20.0, 60.0  # limits of the rendezvous, of an answer
GROUP_S = 8.0  # limit of a collective
MESSAGES, MESSAGE_BYTES = 8, 8 << 20  # with 3, the rate of a busy host varied by 3.6
SLOW = 0.25  # share of the usual rate below which a node is slow
# {name of a fact: what to do if the nodes differ in it; "": they may differ}
ADVICE = {
    "host": "",
    "device": "look at CUDA_VISIBLE_DEVICES and the driver, take equal nodes, or set trainer.device=cpu",
    "program": "install the same code and torch, because other code may compute other bits",
    "threads": "set OMP_NUM_THREADS, because the bits of a result depend on it",
    "kernels": "set the same variables, because the bits of a result depend on them",
    "Python": "",
    "MB/s": "",
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
    """Examine all workers; rank 0 prints a report. Collective.

    Raises NonRetryableError if there are faults, PeersMissing if a worker is missing or does not answer, and
    the errors of `Rendezvous` and `all_gather`.
    """
    from torch.distributed import HashStore

    store = Rendezvous(launch, MEET_S).process_group_store if launch.is_distributed else HashStore()
    facts = find_facts(launch, config)
    rows, faults = report(all_gather(store, launch, "facts", facts))
    if not faults:
        try:
            facts["MB/s"] = run_within(3 * GROUP_S, lambda: exchange(store, launch, config))
        except Exception as error:  # a backend raises exceptions of many kinds, and any is an answer
            said = first_line(error).rpartition("] ")[2]  # without the place in gloo's source
            facts["problem"] = (
                f"the workers cannot compute together ({said}): let TCP ports 32768-60999 in, "
                "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects the nodes, or "
                "set trainer.device=cpu"
            )
        rows, faults = report(all_gather(store, launch, "exchange", facts))
    if launch.rank == 0:
        write_lines([*rows, "", *(faults or ["no fault found"])])
    with contextlib.suppress(Exception):  # rank 0, which may host the store, may have left
        all_gather(store, launch, "done", {})
    if faults:
        raise NonRetryableError(f"faults found: {len(faults)}")


def all_gather(store: Any, launch: Launch, name: str, facts: Facts) -> list[Facts]:
    """Return the facts of all ranks, in the order of the ranks. Collective.

    Facts travel as JSON through `store`, torch's TCPStore or HashStore. Each `name` may be used only once.
    Raises PeersMissing if a rank does not answer within ANSWER_S seconds, and an error of torch.distributed
    if the store is gone.
    """
    keys = [f"{name}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(facts))
    try:
        store.wait(keys, timedelta(seconds=ANSWER_S))
    except RuntimeError:  # of torch.distributed
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        said = f"{list_workers(missing)} did not answer within {ANSWER_S:g} s: look at the output there"
        raise PeersMissing(said, missing) from None
    return [json.loads(store.get(key)) for key in keys]


def find_facts(launch: Launch, config: Config) -> Facts:
    """Return this worker's facts: its host's name as "name", and the facts in ADVICE without "MB/s".

    If the device cannot be used, "problem" says why, and "device" and "kernels" are missing.
    """
    from mingpt.distributed import device as devices

    facts = {
        "name": platform.node(),
        "host": find_address(),
        "program": devices.find_program(),
        "threads": launch.threads(config.trainer.threads),
        "Python": platform.python_version(),
    }
    try:
        devices.check_gloo()
        device = devices.find_device(config.trainer.device, launch)
    except UserError as error:
        return facts | {"problem": str(error)}
    gpu = ", ".join(f"{name} {value}" for name, value in devices.gpu_facts(device).items())
    name, kernels = devices.device_name(device), devices.kernel_variables(device)
    return facts | {"device": gpu or name, "kernels": kernels}


def find_address() -> str:
    """Return where gloo listens: GLOO_SOCKET_IFNAME, else the address of this host's name, else 127.0.0.1."""
    address = "127.0.0.1"
    with contextlib.suppress(OSError):  # the name does not resolve
        address = str(socket.getaddrinfo(platform.node(), None)[0][4][0])
    return os.environ.get("GLOO_SOCKET_IFNAME") or address


def exchange(store: Any, launch: Launch, config: Config) -> float:
    """Connect all workers as training does; return the MB/s that the first worker of a node receives.

    Each rank receives messages from the rank before it, by gloo; the fastest message counts. Returns 0.0 on
    the other workers of a node, and if there is one worker. Collective.
    """
    import torch
    from torch import distributed

    from mingpt.distributed.device import find_device

    rank, workers = launch.rank, launch.world_size
    device = find_device(config.trainer.device, launch)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, None, timedelta(seconds=GROUP_S), workers, rank, store)
    ones = torch.ones(1, device=device)
    distributed.all_reduce(ones)
    ones.item()  # waits for a GPU
    if workers == 1:
        return 0.0
    sent, received = torch.zeros(2, MESSAGE_BYTES, dtype=torch.uint8)
    took_s = []
    for _ in range(MESSAGES):
        began = time.monotonic()
        sending = distributed.isend(sent, (rank + 1) % workers)
        distributed.recv(received, (rank - 1) % workers)
        took_s.append(time.monotonic() - began)
        wait_for(sending)
    return 0.0 if launch.local_rank else round(MESSAGE_BYTES / 1e6 / min(took_s), 1)


def report(workers: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """Return (a line for each value of each fact in ADVICE, a sentence for each fault), naming the nodes.

    `workers` has the facts of each worker, in the order of the ranks. Facts that are empty are left out.
    """
    rows, faults = [], []
    for fact, advice in ADVICE.items():
        nodes: dict[Any, list[str]] = {}  # by the value of the fact
        for there in workers:
            if there.get(fact):
                nodes.setdefault(there[fact], []).append(there["name"])
        values = [f"{', '.join(dict.fromkeys(names))}: {value}" for value, names in nodes.items()]
        rows += [f"{fact:9}{value}" for value in values]
        if advice and len(values) > 1:
            faults.append(f"{fact} differs, {'; '.join(values)}: {advice}")
    rates = sorted(there["MB/s"] for there in workers if there.get("MB/s"))
    for rank, there in enumerate(workers):
        rate = there.get("MB/s")
        if there.get("problem"):
            faults.append(f"{there['name']}: {there['problem']}")
        if rate and rate <= SLOW * rates[3 * len(rates) // 4]:
            faults.append(
                f"{there['name']} receives {rate:,} MB/s from {workers[rank - 1]['name']}, less than a "
                "quarter of what is usual: look at the network cards, the cables and the MTU of both"
            )
    return rows, [f"fault:   {fault}" for fault in dict.fromkeys(faults)]
