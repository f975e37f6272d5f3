"""From what the workers found to a table and sentences: one per fault, with host, cause and what to change.

From who could connect to whom follows a wrong interface, or a port that is blocked. These are functions of
facts: nothing is looked at here.
"""

import hashlib
import ipaddress
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt.tools.doctor.facts import Facts, node_names

Link = tuple[str, str]  # from a node to a node
VARIABLE = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
MAX_CLOCK_S = 1.0
STATES_IN_MEMORY = 2  # a node's memory holds two snapshots
STATES_PER_WORKER = 1  # weights and optimizer; gradients and activations are not counted
MAX_SETTINGS = 3  # named in one sentence
NOTHING = "-"


def find_link_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """One sentence per node that listens in the wrong place, per node cut off, and per blocked link."""
    nodes = {names[worker.rank]: worker for worker in reversed(workers)}
    nodes = {name: nodes[name] for name in dict.fromkeys(names.values())}
    failed: dict[Link, str] = {}
    for worker in workers:
        for rank, reason in worker.unreachable.items():
            if rank in names:
                failed.setdefault((names[worker.rank], names[rank]), reason)
    sentences = []
    for name in nodes:
        others = [other for other in nodes if other != name]
        is_alone = bool(others) and all((other, name) in failed for other in others)
        wrong = describe_wrong_interface(name, nodes) if is_alone else None
        if wrong:
            sentences.append(wrong)
            failed = {link: reason for link, reason in failed.items() if link[1] != name}
    return [*sentences, *describe_blocked(failed, nodes)]


def describe_wrong_interface(name: str, nodes: Mapping[str, Facts]) -> str | None:
    """A sentence if the address of a node that nobody reaches is one that the others could not reach."""
    node, others = nodes[name], [other for key, other in nodes.items() if key != name]
    if node.address is None:
        return None
    common = common_network(others)
    address = ipaddress.ip_address(node.address)
    if not address.is_loopback and (common is None or address in common):
        return None
    there = ", ".join(f"{one} ({network})" for one, network in node.networks.items())
    better = [
        one for one, network in node.networks.items()
        if common is not None and ipaddress.ip_interface(network).ip in common
    ]  # fmt: skip
    change = f"set {VARIABLE} to {better[0]}" if better else f"set {VARIABLE} to the right one of {there}"
    where = f"; they are in {common}" if common is not None else ""
    return (
        f"{name} listens on {node.address}, interface {interface_of(node)}, which no other node "
        f"reaches{where}: {change} on {name}"
    )


def interface_of(node: Facts) -> str:
    """The interface that has the address of a node."""
    found = [one for one, network in node.networks.items() if network.partition("/")[0] == node.address]
    is_loopback = node.address is not None and ipaddress.ip_address(node.address).is_loopback
    return found[0] if found else ("lo" if is_loopback else "unknown")


def common_network(nodes: Sequence[Facts]) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network in which most of these nodes listen; None if none is known."""
    found = []
    for node in nodes:
        for network in node.networks.values():
            interface = ipaddress.ip_interface(network)
            if str(interface.ip) == node.address and not interface.is_loopback:
                found.append(interface.network)
    return Counter(found).most_common(1)[0][0] if found else None


def describe_blocked(failed: Mapping[Link, str], nodes: Mapping[str, Facts]) -> list[str]:
    """A sentence per node that nobody reaches or that reaches nobody, then one per remaining link."""
    sentences, remaining = [], dict(failed)
    for name, node in nodes.items():
        others = [other for other in nodes if other != name]
        incoming, outgoing = [(other, name) for other in others], [(name, other) for other in others]
        is_cut_in = len(others) > 1 and all(link in remaining for link in incoming)
        is_cut_out = len(others) > 1 and all(link in remaining for link in outgoing)
        if is_cut_in:
            both = ", nor the other way round" if is_cut_out else ""
            reason = remaining[incoming[0]]
            sentences.append(
                f"no other node can connect to {name} on {node.address} ({reason}){both}: "
                f"{way_out(name, node)}"
            )
        elif is_cut_out:
            reason = remaining[outgoing[0]]
            sentences.append(
                f"{name} cannot connect to any other node ({reason}): "
                f"{way_out('the other nodes', node, name)}"
            )
        if is_cut_in or is_cut_out:
            dropped = {*(incoming if is_cut_in else ()), *(outgoing if is_cut_out else ())}
            remaining = {link: why for link, why in remaining.items() if link not in dropped}
    for (source, target), reason in remaining.items():
        node = nodes[target]
        if source == target:
            sentences.append(
                f"the workers of {target} cannot connect to each other on {node.address} ({reason})"
            )
        elif (target, source) not in remaining:
            sentences.append(
                f"{source} cannot connect to {target} on {node.address} ({reason}), while {target} can "
                f"connect to {source}: {way_out(target, node, source)}"
            )
        elif source < target:
            sentences.append(
                f"{source} and {target} cannot connect to each other ({reason}): "
                f"{way_out(target, node)}, and the other way round"
            )
    return sentences


def way_out(target: str, node: Facts, source: str = "the other nodes") -> str:
    ports = (
        f"TCP ports {node.ports} (net.ipv4.ip_local_port_range)" if node.ports else "all TCP ports above 1023"
    )
    return f"open {ports} of {target} to {source} in the firewalls between them"


def find_faults(workers: Sequence[Facts]) -> list[str]:
    """One sentence per fault; none if the cluster is healthy."""
    names = node_names(workers)
    nodes = {names[worker.rank]: worker for worker in workers if worker.local_rank == 0}
    return [
        *find_broken(workers, names),
        *find_different(workers, names),
        *find_data_faults(nodes),
        *find_clock_faults(nodes),
        *(sentence for name, node in nodes.items() for sentence in find_folder_faults(name, node)),
        *(sentence for name, node in nodes.items() for sentence in find_memory_faults(name, node)),
        *find_link_faults(workers, names),
        *find_group_faults(workers, names),
    ]


def find_broken(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """What a worker could not do at all; once per node."""
    found = []
    for worker in workers:
        name = names[worker.rank]
        if worker.config_error:
            found.append(f"{name}: the configuration is wrong there: {worker.config_error}")
        if worker.device_error:
            found.append(f"{name}: {worker.device_error}")
        if worker.address_error:
            found.append(
                f"{name}: {worker.address_error}: set GLOO_SOCKET_IFNAME there to one that the others reach"
            )
        if worker.unfinished:
            found.append(
                f"{name}, worker {worker.rank}: {worker.unfinished}: look at that node and its disks"
            )
    return list(dict.fromkeys(found))


def find_different(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """Nodes on which something is not as on most of the others."""
    known = [worker for worker in workers if worker.torch]
    sentences = []
    for name, own, most in odd_ones({worker.rank: worker.torch for worker in known}, names):
        sentences.append(
            f"{name} has torch {own} and the others {most}: install {most} there (pip install "
            f"torch=={most.partition('+')[0]}), since the bits of a result depend on it"
        )
    configured = [worker for worker in known if worker.config]
    for name, own, most in odd_ones({worker.rank: worker.device_type for worker in configured}, names):
        if own and most:
            sentences.append(
                f"{name} computes on {own} and the others on {most}: look at its driver and at "
                "CUDA_VISIBLE_DEVICES, or set trainer.device=cpu"
            )
    for name, own, most in odd_ones({worker.rank: worker.threads for worker in configured}, names):
        sentences.append(
            f"{name} computes with {own} CPU threads per worker and the others with {most}: set "
            f"OMP_NUM_THREADS={most} there, since the bits of a result depend on it"
        )
    for name, own, most in odd_ones({worker.rank: worker.data for worker in workers if worker.data}, names):
        path = next(worker.data_path for worker in workers if names[worker.rank] == name)
        sentences.append(
            f"data.path {path} is another text on {name} (sha256 {own[:12]}) than on the others "
            f"({most[:12]}): copy the same file there, since the first node that can read it reads it for all"
        )
    for name, own, most in odd_ones({worker.rank: worker.config for worker in configured}, names):
        sentences.append(
            f"{name} is started with {show_differences(own, most)}: give all nodes the same "
            "configuration file and command line"
        )
    return sentences


def odd_ones(values: Mapping[int, Any], names: Mapping[int, str]) -> list[tuple[str, Any, Any]]:
    """(node, its value, the value of most) of each node that differs; of two equal halves rank 0's counts."""
    counts = Counter(repr(value) for value in values.values())
    if len(counts) < 2:
        return []
    shown, _ = counts.most_common(1)[0]  # the first of those that are as frequent
    most = next(value for value in values.values() if repr(value) == shown)
    found = {names[rank]: (names[rank], value, most) for rank, value in values.items() if value != most}
    return list(found.values())


def show_differences(own: Mapping[str, Any], most: Mapping[str, Any]) -> str:
    keys = [key for key in most if own.get(key) != most[key]]
    more = f" and {len(keys) - MAX_SETTINGS} more" if len(keys) > MAX_SETTINGS else ""
    shown = keys[:MAX_SETTINGS]
    there = ", ".join(f"{key}={own.get(key)}" for key in shown)
    return f"{there}{more}, the others with {', '.join(f'{key}={most[key]}' for key in shown)}"


def find_data_faults(nodes: Mapping[str, Facts]) -> list[str]:
    """Why no node can read the text; the same error in one sentence. None if any can: it reads for all."""
    by_error: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if node.data_error is None:
            return []
        by_error.setdefault(node.data_error, []).append(name)
    return [f"{' and '.join(names)}: {error}" for error, names in by_error.items()]


def find_clock_faults(nodes: Mapping[str, Facts]) -> list[str]:
    """Clocks that differ from those of most nodes; of two equal halves the one with rank 0 counts."""
    clocks = {name: node.clock_s for name, node in nodes.items() if node.clock_s is not None}
    if not clocks:
        return []

    def agreeing(clock_s: float) -> int:
        return sum(abs(other - clock_s) < MAX_CLOCK_S for other in clocks.values())

    most = max(clocks.values(), key=agreeing)
    return [
        f"the clock of {name} is {abs(clock_s - most):.1f} s {'ahead of' if clock_s > most else 'behind'} "
        "the others': have NTP set it (chronyc makestep), since claims and logs are read by their time"
        for name, clock_s in clocks.items()
        if abs(clock_s - most) >= MAX_CLOCK_S
    ]


def find_folder_faults(name: str, node: Facts) -> list[str]:
    """Where a node cannot write or read; folders with the same error in one sentence."""
    by_error: dict[str, list[str]] = {}
    for folder, error in node.folders.items():
        if error:
            by_error.setdefault(error, []).append(folder)
    return [
        f"{' and '.join(folders)} cannot be written and read on {name} ({error}): look at its mount and its "
        f"owner there, or choose another {'snapshot.path' if 'snapshot.path' in folders[-1] else 'run_dir'}"
        for error, folders in by_error.items()
    ]


def find_memory_faults(name: str, node: Facts) -> list[str]:
    """Too little room for the snapshots of a node's memory, or for its workers."""
    if node.state_bytes is None:
        return []
    found, needed = [], STATES_IN_MEMORY * node.state_bytes
    way_out = "set snapshot.memory_path to another folder, or snapshot.memory_every=0 to do without"
    if node.memory_error:
        found.append(
            f"snapshot.memory_path {node.memory_path} cannot be used on {name} ({node.memory_error}): "
            f"{way_out}"
        )
    elif node.memory_free is not None and node.memory_free < needed:
        found.append(
            f"snapshot.memory_path {node.memory_path} on {name} has {size(node.memory_free)} free and two "
            f"states of this model take {size(needed)}: enlarge it (a container's /dev/shm by --shm-size or "
            f"an emptyDir of medium Memory), {way_out}"
        )
    in_memory = needed if node.memory_path else 0
    by_workers = (
        node.local_world_size * STATES_PER_WORKER * node.state_bytes if node.device_type == "cpu" else 0
    )
    if node.ram_free is not None and node.ram_free < in_memory + by_workers:
        found.append(
            f"{name} has {size(node.ram_free)} of memory free and its {node.local_world_size} workers with "
            f"their snapshots in memory take at least {size(in_memory + by_workers)}: start fewer workers "
            "there (--nproc_per_node), or choose a smaller model"
        )
    return found


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def find_group_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """All connect to all, and yet a collective fails."""
    errors = {names[worker.rank]: worker.all_reduce_error for worker in workers if worker.all_reduce_error}
    if not errors:
        return []
    error = next(iter(errors.values()))
    return [
        f"all workers can connect to each other, but an all-reduce fails on {' and '.join(errors)} "
        f"({error}): see whether the network drops large packets (MTU), and set NCCL_SOCKET_IFNAME as "
        "GLOO_SOCKET_IFNAME"
    ]


def make_table(workers: Sequence[Facts]) -> list[str]:
    """Lines of text. What is found once per node stands in the row of its first worker."""
    rows = [["worker", "host", "device", "torch", "clock", "data", "config", "snapshots", "shared",
             "all-reduce", "memory for snapshots"]]  # fmt: skip
    rows += [make_row(worker, workers) for worker in workers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def make_row(worker: Facts, workers: Sequence[Facts]) -> list[str]:
    return [
        str(worker.rank),
        f"{worker.host} {worker.address or ''}".strip(),
        worker.device or NOTHING,
        worker.torch or NOTHING,
        NOTHING if worker.clock_s is None else f"{worker.clock_s:+.3f} s",
        worker.data[:8] if worker.data else NOTHING,
        config_digest(worker),
        describe_folders(worker),
        describe_sharing(worker, workers),
        f"{worker.all_reduce_mb_s:.0f} MB/s" if worker.all_reduce_mb_s else NOTHING,
        describe_memory(worker),
    ]


def config_digest(worker: Facts) -> str:
    if not worker.config:
        return NOTHING
    return hashlib.sha256(json.dumps(worker.config, sort_keys=True).encode()).hexdigest()[:8]


def describe_folders(worker: Facts) -> str:
    if not worker.folders:
        return NOTHING
    errors = [error for error in worker.folders.values() if error]
    return errors[0][:40] if errors else "written, read"


def describe_sharing(worker: Facts, workers: Sequence[Facts]) -> str:
    """With how many of the other nodes it shares the folder of its snapshots."""
    others = {one.probe for one in workers if one.probe and one.probe != worker.probe}
    if not worker.probe or not others:
        return NOTHING
    seen = others & set(worker.sees)
    if seen == others:
        return "by all"
    return f"with {len(seen)} of {len(others)}" if seen else "own"


def describe_memory(worker: Facts) -> str:
    if worker.memory_free is None or worker.state_bytes is None:
        return NOTHING
    return f"{size(worker.memory_free)} free, {size(STATES_IN_MEMORY * worker.state_bytes)} needed"
