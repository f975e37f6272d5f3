"""From who could connect to whom to sentences: a wrong interface, or a port that is blocked. Pure."""

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence

from mingpt.doctor.facts import Facts

Link = tuple[str, str]  # from a node to a node
VARIABLE = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"


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
