"""What one worker finds out about itself and its node, and from the facts of all to a table and sentences.

Facts are plain values that travel as JSON: what a worker has not found out is missing. Of a node as a whole
(data, folders, memory) only its first worker, local rank 0, finds anything out. A fact whose name ends with
`error` is a reason in words, None if all is well. There is one sentence per fault, with host, cause and what
to change.
"""

import contextlib
import hashlib
import ipaddress
import json
import os
import platform
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.system import start
from mingpt.config import Config, flatten, settings, to_dict
from mingpt.data import is_shards, make_corpus, open_shards, read_bytes
from mingpt.distributed import Launch
from mingpt.snapshot import SnapshotStore
from mingpt.tools.plan.workload import Workload

Facts = dict[str, Any]
Link = tuple[str, str]  # from a node to a node
VOCABULARY_UNREAD = 256  # tokens, where the text has not been read: only the state's size depends on it
VARIABLE = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
MAX_CLOCK_S = 1.0
STATES_IN_MEMORY = 2  # a node's memory holds two snapshots
MAX_SETTINGS = 3  # named in one sentence
NOTHING = "-"
# What is to be the same on all workers, and the sentence on a node where it is not as on most.
COMPARED = {
    "torch": "{name} has torch {own} and the others {most}: install {most} there (pip install "
    "torch=={release}), since the bits of a result depend on it",
    "device_type": "{name} computes on {own} and the others on {most}: look at its driver and at "
    "CUDA_VISIBLE_DEVICES, or set trainer.device=cpu",
    "threads": "{name} computes with {own} CPU threads per worker and the others with {most}: set "
    "OMP_NUM_THREADS={most} there, since the bits of a result depend on it",
    "data": "data.path {path} is another text on {name} (sha256 {own:.12}) than on the others "
    "({most:.12}): copy the same file there, since the first node that can read it reads it for all",
    "config": "{name} is started with {differences}: give all nodes the same configuration file and "
    "command line",
    "clock_s": "the clock of {name} is {seconds} the others': have NTP set it (chronyc makestep), since "
    "claims and logs are read by their time",
}
# What a worker could not do, and the sentence on it.
BROKEN = {
    "config_error": "{name}: the configuration is wrong there: {reason}",
    "device_error": "{name}: {reason}",
    "address_error": "{name}: {reason}: set GLOO_SOCKET_IFNAME there to one that the others reach",
    "unfinished": "{name}, worker {rank}: {reason}: look at that node and its disks",
}


def node_names(workers: Sequence[Facts]) -> dict[int, str]:
    """{rank: name of its node}: the host name, with the node's number where several nodes share the name."""
    nodes: dict[str, set[int]] = {}
    for worker in workers:
        nodes.setdefault(worker["host"], set()).add(worker["node"])
    names = {}
    for worker in workers:
        number = f" (node {worker['node']})" if len(nodes[worker["host"]]) > 1 else ""
        names[worker["rank"]] = worker["host"] + number
    return names


class Folders:
    """Where a run writes, tried by writing, reading and removing a file; `places` is {what: path or URL}.

    What was missing before is removed by `clean_up`, once the other nodes have looked for it. Of nodes that
    share a disk, one may make `run` and another one `run/snapshots`: each removes, after its own probes, what
    any of them has made (`share`), so that whoever is last finds nothing in it.
    """

    def __init__(self, config: Config) -> None:
        snapshots = config.snapshot.path
        named = "snapshot.path" if snapshots else "the snapshot folder"
        self.places = {f"run_dir {config.run_dir}": config.run_dir}
        snapshots = snapshots or str(Path(config.run_dir) / "snapshots")
        self.places[f"{named} {snapshots}"] = snapshots
        self.probe = f"doctor-{uuid.uuid4().hex[:12]}"
        self.made: set[Path] = set()
        self.stores: list[SnapshotStore] = []

    def try_one(self, place: str) -> str | None:
        """Why a folder cannot be used; None if it can."""
        content = self.probe.encode()
        try:
            store = SnapshotStore(place, retries_s=())
            if store.is_local:
                folders = (Path(store.root), *Path(store.root).parents)
                self.made |= {folder for folder in folders if not folder.exists()}
            store.files.makedirs(store.root, exist_ok=True)
            self.stores.append(store)
            store.write_atomic(self.probe, content)
            read = store.files.cat_file(store.path(self.probe))
        except DriverError as error:
            return reason_of(error)
        return None if read == content else "what is written there is not what is read back"

    def visible(self) -> list[str]:
        """The probes in the last folder: those of other nodes if it is shared with them."""
        try:
            return [name for name in self.stores[-1].names() if name.startswith("doctor-")]
        except DriverError:  # try_one has reported it
            return []

    def share(self, sees: Sequence[str], workers: Iterable[Facts]) -> None:
        """Take over what others have made whose probes are seen here."""
        for worker in workers:
            if worker.get("probe") in sees:
                self.made |= {Path(folder) for folder in worker["made"]}

    def clean_up(self) -> None:
        for store in self.stores:
            with contextlib.suppress(Exception):  # it was never written, and try_one has reported why
                store.files.rm_file(store.path(self.probe))
        for folder in sorted(self.made, reverse=True):  # what lies in a folder comes before it
            with contextlib.suppress(OSError):  # another rank's probe is in it, or a run, or it is gone
                folder.rmdir()


def identity(launch: Launch) -> Facts:
    """The facts that say which worker it is."""
    return {
        "rank": launch.rank,
        "node": launch.node_rank,
        "host": platform.node(),
        "local_rank": launch.local_rank,
    }


def find_own(launch: Launch, config: Config | None) -> Facts:
    """The facts that need no look at the disk."""
    import torch

    found: Facts = {"torch": torch.__version__}
    if config is None:
        return found
    from mingpt.distributed.device import device_name, find_device

    flat = flatten(to_dict(config))
    found["config"] = {key: flat[key] for key, setting in settings().items() if setting.affects_result}
    found["threads"] = launch.threads(config.trainer)
    try:
        device = find_device(config.trainer.device, launch)
        found |= {"device_type": device.type, "device": device_name(device)}
    except UserError as error:
        found["device_error"] = str(error)
    return found


def find_data(config: Config) -> Facts:
    """The text's fingerprint, if its path is on this node, and the size of the state of the model for it."""
    found: Facts = {"data_path": config.data.path}
    vocabulary = VOCABULARY_UNREAD
    if "://" not in config.data.path:
        try:
            if is_shards(config.data.path):
                found["data"] = open_shards(config.data.path, config.data.val_fraction).fingerprint
                vocabulary = config.data.vocab_size or vocabulary
            else:
                text = read_bytes(config.data)
                found["data"] = hashlib.sha256(text).hexdigest()
                vocabulary = make_corpus(text, config.data).vocab_size
        except UserError as error:
            found["data_error"] = str(error)
    job = Workload(config, vocabulary, workers=1, on_cpu=True, dtype="float32")
    return found | {"state_bytes": job.state_bytes}


def find_memory(config: Config) -> Facts:
    """Free bytes for snapshots in memory."""
    if not config.snapshot.memory_every:
        return {}
    found: Facts = {"memory_path": config.snapshot.memory_path}
    try:
        space = os.statvfs(config.snapshot.memory_path)
        found["memory_free"] = space.f_bavail * space.f_frsize
    except OSError as error:
        found["memory_error"] = reason_of(error)
    return found


class Findings:
    """What this worker finds without the others, in the background: a disk that hangs must not hang it."""

    def __init__(self, launch: Launch, config: Config | None, folders: Folders | None) -> None:
        self.found = identity(launch)
        self.began_at = time.monotonic()
        self.doing: str | None = "looking at its device"
        self.error: str | None = None
        _, self.thread = start(lambda: self.find(launch, config, folders))

    def find(self, launch: Launch, config: Config | None, folders: Folders | None) -> None:
        try:
            self.found |= find_own(launch, config)
            if config is not None and folders is not None:
                self.found |= find_memory(config)
                tried: dict[str, str | None] = {}
                for name, place in folders.places.items():
                    self.doing = f"writing to {name}"
                    tried[name] = folders.try_one(place)
                self.found |= {"folders": tried, "probe": folders.probe}
                self.found["made"] = [str(folder) for folder in folders.made]
                self.doing = f"reading data.path {config.data.path}"
                self.found |= find_data(config)
            self.doing = None
        except Exception as error:  # told to rank 0 as a fault
            self.error = reason_of(error)

    def take(self, deadline: float) -> Facts:
        """What has been found by then, in the clock of time.monotonic."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.doing is None:
            return dict(self.found)
        reason = self.error or f"not done after {time.monotonic() - self.began_at:.0f} s"
        return self.found | {"unfinished": f"{self.doing}: {reason}"}


def find_faults(workers: Sequence[Facts]) -> list[str]:
    """One sentence per fault; none if the cluster is healthy."""
    names = node_names(workers)
    nodes = {names[worker["rank"]]: worker for worker in workers if worker["local_rank"] == 0}
    return [
        *find_broken(workers, names),
        *(sentence for fact in COMPARED for sentence in find_odd_ones(fact, workers, names)),
        *find_data_faults(nodes),
        *(sentence for name, node in nodes.items() for sentence in find_folder_faults(name, node)),
        *(sentence for name, node in nodes.items() for sentence in find_memory_faults(name, node)),
        *find_link_faults(workers, names),
        *find_group_faults(workers, names),
    ]


def find_broken(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """What a worker could not do at all; once per node."""
    found = []
    for worker in workers:
        rank = worker["rank"]
        for fact, sentence in BROKEN.items():
            if worker.get(fact):
                found.append(sentence.format(name=names[rank], rank=rank, reason=worker[fact]))
    return list(dict.fromkeys(found))


def find_odd_ones(fact: str, workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """A sentence per node whose fact is not as on most; of two equal halves rank 0's counts."""
    known = [worker for worker in workers if worker.get(fact) is not None]
    if not known:
        return []

    def supporters(worker: Facts) -> int:
        return sum(are_alike(worker[fact], other[fact]) for other in known)

    most = max(known, key=supporters)[fact]  # the first of those that are as frequent
    found = {}
    for worker in known:
        name, own = names[worker["rank"]], worker[fact]
        if not are_alike(own, most):
            found[name] = COMPARED[fact].format(
                name=name,
                own=own,
                most=most,
                release=str(most).partition("+")[0],
                path=worker.get("data_path"),
                differences=show_differences(own, most) if fact == "config" else "",
                seconds=show_lead(own - most) if fact == "clock_s" else "",
            )
    return list(found.values())


def are_alike(one: Any, other: Any) -> bool:
    """Whether facts are the same; clocks, the only fractions, may differ by less than MAX_CLOCK_S."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < MAX_CLOCK_S
    return bool(one == other)


def show_lead(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"


def show_differences(own: Mapping[str, Any], most: Mapping[str, Any]) -> str:
    keys = [key for key in most if own.get(key) != most[key]]
    more = f" and {len(keys) - MAX_SETTINGS} more" if len(keys) > MAX_SETTINGS else ""
    shown = keys[:MAX_SETTINGS]
    there = ", ".join(f"{key}={own.get(key)}" for key in shown)
    return f"{there}{more}, the others with {', '.join(f'{key}={most[key]}' for key in shown)}"


def find_data_faults(nodes: Mapping[str, Facts]) -> list[str]:
    """Why no node can read the text; the same error in one sentence. None if any can: it reads for all."""
    errors = {name: node.get("data_error") for name, node in nodes.items()}
    if None in errors.values():
        return []
    return [f"{' and '.join(names)}: {error}" for error, names in group(errors).items()]


def group(reasons: Mapping[str, str | None]) -> dict[str, list[str]]:
    """{reason: what has it}, from {what: reason}."""
    found: dict[str, list[str]] = {}
    for what, reason in reasons.items():
        if reason:
            found.setdefault(reason, []).append(what)
    return found


def find_folder_faults(name: str, node: Facts) -> list[str]:
    """Where a node cannot write or read; folders with the same error in one sentence."""
    return [
        f"{' and '.join(folders)} cannot be written and read on {name} ({error}): look at its mount and its "
        f"owner there, or choose another {'snapshot.path' if 'snapshot.path' in folders[-1] else 'run_dir'}"
        for error, folders in group(node.get("folders", {})).items()
    ]


def find_memory_faults(name: str, node: Facts) -> list[str]:
    """Too little room for the snapshots of a node's memory."""
    path, free, error = (node.get(f"memory_{what}") for what in ("path", "free", "error"))
    needed = STATES_IN_MEMORY * node.get("state_bytes", 0)
    way_out = "set snapshot.memory_path to another folder, or snapshot.memory_every=0 to do without"
    if error:
        return [f"snapshot.memory_path {path} cannot be used on {name} ({error}): {way_out}"]
    if free is None or free >= needed:
        return []
    return [
        f"snapshot.memory_path {path} on {name} has {size(free)} free and two states of this model take "
        f"{size(needed)}: enlarge it (a container's /dev/shm by --shm-size or an emptyDir of medium Memory), "
        f"{way_out}"
    ]


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def find_link_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """One sentence per node that listens in the wrong place, per node cut off, and per blocked link."""
    nodes: dict[str, Facts] = {}
    failed: dict[Link, str] = {}
    for worker in workers:
        name = names[worker["rank"]]
        nodes.setdefault(name, worker)
        for rank, reason in worker.get("unreachable", ()):
            failed.setdefault((name, names[rank]), reason)
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
    node = nodes[name]
    if not node.get("address"):
        return None
    common = common_network([other for key, other in nodes.items() if key != name])
    address = ipaddress.ip_address(node["address"])
    if not address.is_loopback and (common is None or address in common):
        return None
    interface, better = "lo" if address.is_loopback else "unknown", []
    for one, network in node["networks"].items():
        place = ipaddress.ip_interface(network).ip
        if place == address:
            interface = one
        if common is not None and place in common:
            better.append(one)
    there = ", ".join(f"{one} ({network})" for one, network in node["networks"].items())
    where = f"; they are in {common}" if common is not None else ""
    return (
        f"{name} listens on {address}, interface {interface}, which no other node reaches{where}: set "
        f"{VARIABLE} to {better[0] if better else f'the right one of {there}'} on {name}"
    )


def common_network(nodes: Sequence[Facts]) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network in which most of these nodes listen; None if none is known."""
    found = []
    for node in nodes:
        for network in node.get("networks", {}).values():
            interface = ipaddress.ip_interface(network)
            if str(interface.ip) == node.get("address") and not interface.is_loopback:
                found.append(interface.network)
    return max(found, key=found.count, default=None)


def describe_blocked(failed: Mapping[Link, str], nodes: Mapping[str, Facts]) -> list[str]:
    """A sentence per node that nobody reaches or that reaches nobody, then one per remaining link."""
    sentences, remaining = [], dict(failed)
    for name, node in nodes.items():
        others = [other for other in nodes if other != name]
        ways = (
            (f"no other node can connect to {name} on {node.get('address')}", [(o, name) for o in others]),
            (f"{name} cannot connect to any other node", [(name, o) for o in others]),
        )
        for what, links in ways:
            if len(others) > 1 and all(link in remaining for link in links):
                reason = remaining[links[0]]
                sentences.append(f"{what} ({reason}): {way_out(links[0][1], nodes, links[0][0])}")
                remaining = {link: why for link, why in remaining.items() if name not in link}
    for (source, target), reason in remaining.items():
        what = f"{source} cannot connect to {target} on {nodes[target].get('address')}"
        if source != target and (target, source) in remaining:
            if source > target:
                continue  # said with the other direction
            what = f"{source} and {target} cannot connect to each other"
        sentences.append(f"{what} ({reason}): {way_out(target, nodes, source)}")
    return sentences


def way_out(target: str, nodes: Mapping[str, Facts], source: str) -> str:
    ports = nodes[target].get("ports")
    spelled = f"TCP ports {ports} (net.ipv4.ip_local_port_range)" if ports else "all TCP ports above 1023"
    return f"open {spelled} of {target} to {source} in the firewalls between them"


def find_group_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """All connect to all, and yet a collective fails."""
    errors = {names[one["rank"]]: one["all_reduce_error"] for one in workers if one.get("all_reduce_error")}
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
    rows = [make_row(worker, workers) for worker in workers]
    columns = [[title, *(row[title] for row in rows)] for title in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    ]


def make_row(worker: Facts, workers: Sequence[Facts]) -> dict[str, str]:
    """Cells by column; NOTHING where a fact is not known."""
    row = {
        "worker": str(worker["rank"]),
        "host": f"{worker['host']} {worker.get('address') or ''}".strip(),
        "device": worker.get("device") or NOTHING,
        "torch": worker.get("torch") or NOTHING,
        "clock": NOTHING,
        "data": (worker.get("data") or NOTHING)[:8],
        "config": NOTHING,
        "snapshots": NOTHING,
        "shared": describe_sharing(worker, workers),
        "all-reduce": NOTHING,
        "memory for snapshots": NOTHING,
    }
    if worker.get("clock_s") is not None:
        row["clock"] = f"{worker['clock_s']:+.3f} s"
    if worker.get("config"):
        row["config"] = hashlib.sha256(json.dumps(worker["config"], sort_keys=True).encode()).hexdigest()[:8]
    if worker.get("folders"):
        row["snapshots"] = next(
            (error[:40] for error in worker["folders"].values() if error), "written, read"
        )
    if worker.get("all_reduce_mb_s"):
        row["all-reduce"] = f"{worker['all_reduce_mb_s']:.0f} MB/s"
    if worker.get("memory_free") is not None and "state_bytes" in worker:
        needed = STATES_IN_MEMORY * worker["state_bytes"]
        row["memory for snapshots"] = f"{size(worker['memory_free'])} free, {size(needed)} needed"
    return row


def describe_sharing(worker: Facts, workers: Sequence[Facts]) -> str:
    """With how many of the other nodes it shares the folder of its snapshots."""
    own = worker.get("probe")
    others = {one["probe"] for one in workers if one.get("probe")} - {own}
    if not own or not others:
        return NOTHING
    seen = others & set(worker.get("sees", ()))
    if seen == others:
        return "by all"
    return f"with {len(seen)} of {len(others)}" if seen else "own"
