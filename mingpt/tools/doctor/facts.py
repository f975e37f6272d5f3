"""The facts that a worker finds about itself and its node, and the table and sentences made from them.

A worker sends its facts as JSON, {name: value}; a fact that it has not found is missing. A fact whose name
ends with `error` says what failed; it is missing or None if nothing failed. Each fault gets a sentence with
host, cause and what to change. Data and folders are not looked at: the start of the trainer does that.
"""

import ipaddress
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt.base.errors import UserError
from mingpt.config import Config, result_settings, to_dict
from mingpt.distributed import Launch

Facts = dict[str, Any]
MAX_CLOCK_S = 1.0
MAX_SETTINGS = 6  # named in one sentence
# {fact that must be the same on all workers: sentence on a node where it differs from most}
COMPARED = {
    "torch": "{name} has torch {own} and the others {most}: pip install torch=={most} there, since the bits "
    "of a result depend on it",
    "device_type": "{name} computes on {own} and the others on {most}: look at its driver and at "
    "CUDA_VISIBLE_DEVICES, or set trainer.device=cpu",
    "threads": "{name} computes with {own} CPU threads per worker and the others with {most}: set "
    "OMP_NUM_THREADS={most} there, since the bits of a result depend on it",
    "config": "{name} is started with {differences}: give all nodes the same configuration file and "
    "command line",
    "clock_s": "the clock of {name} differs from the others' by {lead_s:+.1f} s: have NTP set it (chronyc "
    "makestep), since claims and logs are read by their time",
}
# The columns of the table: {title: (fact, its format)}.
COLUMNS = {
    "device": ("device", "{}"),
    "torch": ("torch", "{}"),
    "clock": ("clock_s", "{:+.3f} s"),
    "all-reduce": ("all_reduce_mb_s", "{:.0f} MB/s"),
}
# {fact that a worker has only if something failed: sentence on it}
BROKEN = {
    "device_error": "{name}: {reason}",
    "gpus_error": "{reason}",
    "name_error": "{name}: {reason}, but torchrun looks it up: add --local_addr=127.0.0.1 to torchrun on one "
    "node, and --local_addr with the node's address on several",
    "address_error": "{name}: {reason}: set GLOO_SOCKET_IFNAME there to one that the others reach",
    "unfinished": "{name}, worker {rank}: {reason}: look at that node and its disks",
}


def node_names(workers: Sequence[Facts]) -> dict[int, str]:
    """Return {rank: name of its node}: the host name, plus the node's number if nodes share a host name."""
    nodes = {(worker["host"], worker["node"]) for worker in workers}
    counts = Counter(host for host, _ in nodes)
    return {
        worker["rank"]: worker["host"] + (f" (node {worker['node']})" if counts[worker["host"]] > 1 else "")
        for worker in workers
    }


def identity(launch: Launch) -> Facts:
    """Return the facts that identify this worker: `rank`, `node` (its number), `host`, `local_rank`."""
    return {
        "rank": launch.rank,
        "node": launch.node_rank,
        "host": platform.node(),
        "local_rank": launch.local_rank,
    }


def find_own(launch: Launch, config: Config) -> Facts:
    """Return the facts `torch` (version), `threads` (per worker), `config`, and those of the device.

    `config` has the settings that affect the result; the device is `device_type` and `device`, or an error.
    """
    import torch

    from mingpt.distributed.device import device_name, find_device, gpu_facts, idle_gpus

    found: Facts = {"torch": torch.__version__, "threads": launch.threads(config.trainer)}
    found["config"] = result_settings(to_dict(config))
    try:
        device = find_device(config.trainer.device, launch)
        gpu = {name: fact for name, fact in gpu_facts(device).items() if name != "card"}
        about = ", ".join([device_name(device), *(f"{name} {fact}" for name, fact in gpu.items())])
        found |= {"device_type": device.type, "device": about}
        found["gpus_error"] = idle_gpus(config.trainer.device, launch)
    except UserError as error:
        found["device_error"] = str(error)
    return found


def find_faults(workers: Sequence[Facts]) -> list[str]:
    """Return a sentence per fault in the facts of all workers; empty if there is none."""
    names = node_names(workers)
    return [
        *find_broken(workers, names),
        *(sentence for fact in COMPARED for sentence in find_odd_ones(fact, workers, names)),
        *find_link_faults(workers, names),
        *find_group_faults(workers, names),
    ]


def find_broken(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """Return a sentence per fact of BROKEN that a worker has, without repeats. `names` is {rank: node}."""
    found = [
        sentence.format(name=names[worker["rank"]], rank=worker["rank"], reason=worker[fact])
        for worker in workers
        for fact, sentence in BROKEN.items()
        if worker.get(fact)
    ]
    return list(dict.fromkeys(found))


def find_odd_ones(fact: str, workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """Return a sentence per node that has another `fact` than most workers; `names` is {rank: node}.

    Of values that are equally frequent, that of the lowest rank counts as most workers'.
    """
    known = [worker for worker in workers if worker.get(fact) is not None]
    if not known:
        return []

    def supporters(worker: Facts) -> int:
        return sum(are_alike(worker[fact], other[fact]) for other in known)

    most = max(known, key=supporters)[fact]  # of equally frequent values, that of the lowest rank
    found = {}
    for worker in known:
        name, own = names[worker["rank"]], worker[fact]
        if not are_alike(own, most):
            found[name] = COMPARED[fact].format(
                name=name,
                own=own,
                most=most,
                differences=show_differences(own, most) if fact == "config" else "",
                lead_s=own - most if fact == "clock_s" else 0.0,
            )
    return list(found.values())


def are_alike(one: Any, other: Any) -> bool:
    """Whether two values of a fact are equal, or floats (clock offsets in s) less than MAX_CLOCK_S apart."""
    if isinstance(one, float):
        return abs(one - other) < MAX_CLOCK_S
    return bool(one == other)


def show_differences(own: Mapping[str, Any], most: Mapping[str, Any]) -> str:
    """Return the settings that differ, at most MAX_SETTINGS, as "key=value, the others with value; ..."."""
    differing = [
        f"{key}={own.get(key)}, the others with {most[key]}" for key in most if own.get(key) != most[key]
    ]
    return "; ".join(differing[:MAX_SETTINGS])


def find_link_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """Return a sentence per node that a worker cannot connect to: which interface or firewall to change."""
    nodes: dict[str, Facts] = {}
    failed: dict[str, dict[str, str]] = {}  # {to a node: {from a node: reason}}
    for worker in workers:
        name = names[worker["rank"]]
        nodes.setdefault(name, worker)
        for rank, reason in worker.get("unreachable", ()):
            failed.setdefault(names[rank], {}).setdefault(name, reason)
    sentences = []
    for target, reasons in failed.items():
        is_alone = reasons.keys() >= nodes.keys() - {target}
        wrong = describe_wrong_interface(target, nodes) if is_alone else None
        sources = "all other nodes" if is_alone and len(nodes) > 2 else " and ".join(reasons)
        blocked = (
            f"{sources} cannot connect to {target} on {nodes[target].get('address')} "
            f"({next(iter(reasons.values()))}): open the TCP ports 32768-60999 (or what "
            f"net.ipv4.ip_local_port_range says there) of {target} to {sources} in the firewalls between them"
        )
        sentences.append(wrong or blocked)
    return sentences


def describe_wrong_interface(name: str, nodes: Mapping[str, Facts]) -> str | None:
    """Return a sentence on the interface to set on node `name`, which no other reaches; or None.

    Another interface helps a node that listens on loopback, or that listens on an interface in no other
    node's network while it has one that is in such a network.
    """
    node = nodes[name]
    if not node.get("address"):
        return None
    address = ipaddress.ip_address(node["address"])
    theirs = [ipaddress.ip_address(other["address"]) for other in nodes.values() if other.get("address")]
    networks = {one: ipaddress.ip_interface(text).network for one, text in node["networks"].items()}
    own = next((one for one, network in networks.items() if address in network), "unknown")
    better = [
        one
        for one, network in networks.items()
        if any(other in network and not other.is_loopback for other in theirs if other != address)
    ]
    if own in better or not (better or address.is_loopback):
        return None
    return (
        f"{name} listens on {address}, interface {own}, which no other node reaches: set GLOO_SOCKET_IFNAME "
        f"(and NCCL_SOCKET_IFNAME) to {' or '.join(better or networks)} on {name}"
    )


def find_group_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """Return one sentence if an all-reduce, tried if all can connect, failed on a worker; else none."""
    errors = {names[one["rank"]]: one["all_reduce_error"] for one in workers if one.get("all_reduce_error")}
    reason = next(iter(errors.values()), "")
    advice = (
        "remove the cause, or set trainer.device=cpu"
        if reason.startswith("NCCL: ")  # a reason in NCCL's own words, by first_line
        else "see whether the network drops large packets (MTU), and set NCCL_SOCKET_IFNAME as "
        "GLOO_SOCKET_IFNAME"
    )
    sentence = (
        f"all workers can connect to each other, but an all-reduce fails on {' and '.join(errors)} "
        f"({reason}): {advice}"
    )
    return [sentence] if errors else []


def make_row(worker: Facts) -> dict[str, str]:
    """Return a worker's table row as {column: cell}, with "-" for each fact that the worker has not found."""
    cells = {"worker": str(worker["rank"])}
    cells["host"] = f"{worker['host']} {worker.get('address') or ''}".strip()
    for column, (fact, form) in COLUMNS.items():
        cells[column] = "-" if worker.get(fact) is None else form.format(worker[fact])
    return cells
