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
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.system import start, try_within
from mingpt.config import Config, flatten, settings, to_dict
from mingpt.data import is_shards, local_path, make_corpus, open_shards, read_bytes
from mingpt.distributed import Launch
from mingpt.snapshot import SnapshotStore
from mingpt.tools.plan.workload import Workload

Facts = dict[str, Any]
VOCABULARY_UNREAD = 256  # tokens, where the text has not been read: only the state's size depends on it
VARIABLE = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
MAX_CLOCK_S = 1.0
STATES_IN_MEMORY = 2  # a node's memory holds two snapshots
MAX_SETTINGS = 6  # named in one sentence
NOTHING = "-"
FINDINGS_S, LEAST_FINDINGS_S, LOOK_S = 20.0, 4.0, 2.0
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
    "folder_error": "{reason[0]} cannot be written and read on {name} ({reason[1]}): look at its mount and "
    "its owner there, or choose another {reason[2]}",
    "memory_error": "snapshot.memory_path {reason[0]} on {name} {reason[1]}: enlarge it (a container's "
    "/dev/shm by --shm-size or an emptyDir of medium Memory), set snapshot.memory_path to another folder, or "
    "snapshot.memory_every=0 to do without",
    "unfinished": "{name}, worker {rank}: {reason}: look at that node and its disks",
}


def node_names(workers: Sequence[Facts]) -> dict[int, str]:
    """{rank: name of its node}: the host name, with the node's number where several nodes share the name."""
    nodes = {(worker["host"], worker["node"]) for worker in workers}
    counts = Counter(host for host, _ in nodes)
    return {
        worker["rank"]: worker["host"] + (f" (node {worker['node']})" if counts[worker["host"]] > 1 else "")
        for worker in workers
    }


class Folders:
    """Where a run writes, tried by writing, reading and removing a file; `places` is {setting: path or URL}.

    `missing` are folders that were not there before any worker has tried. Each worker removes all of them
    after its own files, so that of nodes that share a disk whoever is last finds nothing in them.
    """

    def __init__(self, config: Config) -> None:
        self.places = {"run_dir": config.run_dir}
        if config.snapshot.path:
            self.places["snapshot.path"] = config.snapshot.path
        else:
            self.places["the snapshot folder"] = str(Path(config.run_dir) / "snapshots")
        self.probe = f"doctor-{uuid.uuid4().hex[:12]}"
        self.missing: list[Path] = []
        self.stores: list[SnapshotStore] = []
        try_within(LOOK_S, self.find_missing)  # a disk that hangs is told of by try_one

    def find_missing(self) -> None:
        paths = [Path(path).absolute() for path in map(local_path, self.places.values()) if path]
        folders = {folder for path in paths for folder in (path, *path.parents)}
        self.missing = [folder for folder in folders if not os.path.exists(folder)]

    def try_one(self, place: str) -> str | None:
        """Why a folder cannot be used; None if it can."""
        content = self.probe.encode()
        try:
            store = SnapshotStore(place, retries_s=())
            store.files.makedirs(store.root, exist_ok=True)
            self.stores.append(store)
            store.write_atomic(self.probe, content)
            read = store.files.cat_file(store.path(self.probe))
        except DriverError as error:
            return reason_of(error)
        return None if read == content else "what is written there is not what is read back"

    def clean_up(self) -> None:
        for store in self.stores:
            with contextlib.suppress(Exception):  # it was never written, and try_one has reported why
                store.files.rm_file(store.path(self.probe))
        for folder in sorted(self.missing, reverse=True):  # what lies in a folder comes before it
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


def find_memory(config: Config, state_bytes: int) -> Facts:
    """The room for the snapshots of a node's memory."""
    path, needed = config.snapshot.memory_path, STATES_IN_MEMORY * state_bytes
    if not config.snapshot.memory_every:
        return {}
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return {"memory_error": [path, f"cannot be used ({reason_of(error)})"]}
    found: Facts = {"memory": f"{size(free)} free, {size(needed)} needed"}
    if free < needed:
        lack = f"has {size(free)} free and two states of this model take {size(needed)}"
        found["memory_error"] = [path, lack]
    return found


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


class Findings:
    """What this worker finds without the others, in the background: a disk that hangs must not hang it."""

    def __init__(self, launch: Launch, config: Config | None, folders: Folders | None) -> None:
        self.found = identity(launch)
        self.began_at = time.monotonic()
        self.doing = "looking at its device"
        self.outcome, self.thread = start(lambda: self.find(launch, config, folders))

    def find(self, launch: Launch, config: Config | None, folders: Folders | None) -> None:
        self.found |= find_own(launch, config)
        if config is None or folders is None:
            return
        error = None
        for setting, place in folders.places.items():
            self.doing = f"writing to {setting} {place}"
            error = folders.try_one(place)
            if error:
                other = "run_dir" if "snapshot.path" not in folders.places else setting
                self.found["folder_error"] = [f"{setting} {place}", error, other]
                break  # most often the second one lies in the first
        self.found["folders"] = error or "written, read"
        self.doing = f"reading data.path {config.data.path}"
        self.found |= find_data(config)
        self.found |= find_memory(config, self.found["state_bytes"])

    def take(self) -> Facts:
        """What is found within FINDINGS_S, and at least LEAST_FINDINGS_S more."""
        took_s = time.monotonic() - self.began_at
        self.thread.join(max(LEAST_FINDINGS_S, FINDINGS_S - took_s))
        if not self.outcome.done():
            reason = f"not done after {time.monotonic() - self.began_at:.0f} s"
            return self.found | {"unfinished": f"{self.doing}: {reason}"}
        error = self.outcome.exception()
        return self.found | ({"unfinished": f"{self.doing}: {reason_of(error)}"} if error else {})


def find_faults(workers: Sequence[Facts]) -> list[str]:
    """One sentence per fault; none if the cluster is healthy."""
    names = node_names(workers)
    nodes = {names[worker["rank"]]: worker for worker in workers if worker["local_rank"] == 0}
    return [
        *find_broken(workers, names),
        *(sentence for fact in COMPARED for sentence in find_odd_ones(fact, workers, names)),
        *find_data_faults(nodes),
        *find_link_faults(workers, names),
        *find_group_faults(workers, names),
    ]


def find_broken(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """What a worker could not do at all; once per node."""
    found = [
        sentence.format(name=names[worker["rank"]], rank=worker["rank"], reason=worker[fact])
        for worker in workers
        for fact, sentence in BROKEN.items()
        if worker.get(fact)
    ]
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
    keys = [key for key in most if own.get(key) != most[key]][:MAX_SETTINGS]
    there = ", ".join(f"{key}={own.get(key)}" for key in keys)
    return f"{there}, the others with {', '.join(f'{key}={most[key]}' for key in keys)}"


def find_data_faults(nodes: Mapping[str, Facts]) -> list[str]:
    """Why no node can read the text. None if any can: it reads for all."""
    errors = [node.get("data_error") for node in nodes.values()]
    return [] if None in errors else [f"{' and '.join(nodes)}: {errors[0]}"]


def find_link_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """A sentence per node that listens in the wrong place, and per nodes that the same ones cannot reach."""
    nodes: dict[str, Facts] = {}
    failed: dict[str, dict[str, str]] = {}  # {to a node: {from a node: reason}}
    for worker in workers:
        name = names[worker["rank"]]
        nodes.setdefault(name, worker)
        for rank, reason in worker.get("unreachable", ()):
            failed.setdefault(names[rank], {}).setdefault(name, reason)
    sentences = []
    blocked: dict[str, list[str]] = {}  # {from nodes, in words: to nodes}
    for target, reasons in failed.items():
        is_alone = reasons.keys() >= nodes.keys() - {target}
        wrong = describe_wrong_interface(target, nodes) if is_alone else None
        if wrong:
            sentences.append(wrong)
        else:
            sources = "all other nodes" if is_alone and len(nodes) > 2 else " and ".join(reasons)
            blocked.setdefault(sources, []).append(target)
    for sources, targets in blocked.items():
        there = " and ".join(f"{target} on {nodes[target].get('address')}" for target in targets)
        reason = next(iter(failed[targets[0]].values()))
        known = nodes[targets[0]].get("ports")
        ports = f"TCP ports {known} (net.ipv4.ip_local_port_range)" if known else "all TCP ports above 1023"
        sentences.append(
            f"{sources} cannot connect to {there} ({reason}): open {ports} of {' and '.join(targets)} to "
            f"{sources} in the firewalls between them"
        )
    return sentences


def describe_wrong_interface(name: str, nodes: Mapping[str, Facts]) -> str | None:
    """A sentence if a node that nobody reaches listens in a network in which no other node does."""
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
    there = better[0] if better else f"the right one of {', '.join(networks)}"
    return (
        f"{name} listens on {address}, interface {own}, which no other node reaches: set {VARIABLE} to "
        f"{there} on {name}"
    )


def find_group_faults(workers: Sequence[Facts], names: Mapping[int, str]) -> list[str]:
    """All connect to all, and yet a collective fails."""
    errors = {names[one["rank"]]: one["all_reduce_error"] for one in workers if one.get("all_reduce_error")}
    sentence = (
        f"all workers can connect to each other, but an all-reduce fails on {' and '.join(errors)} "
        f"({next(iter(errors.values()), '')}): see whether the network drops large packets (MTU), and set "
        "NCCL_SOCKET_IFNAME as GLOO_SOCKET_IFNAME"
    )
    return [sentence] if errors else []


def make_table(workers: Sequence[Facts]) -> list[str]:
    """Lines of text. What is found once per node stands in the row of its first worker."""
    rows = [make_row(worker) for worker in workers]
    columns = [[title, *(row[title] for row in rows)] for title in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    ]


def make_row(worker: Facts) -> dict[str, str]:
    """Cells by column."""
    config = worker.get("config")
    content = json.dumps(config, sort_keys=True).encode()
    return {
        "worker": str(worker["rank"]),
        "host": f"{worker['host']} {worker.get('address') or ''}".strip(),
        "device": cell("{}", worker.get("device")),
        "torch": cell("{}", worker.get("torch")),
        "clock": cell("{:+.3f} s", worker.get("clock_s")),
        "data": cell("{:.8}", worker.get("data")),
        "config": cell("{:.8}", hashlib.sha256(content).hexdigest() if config else None),
        "snapshots": cell("{:.40}", worker.get("folders")),
        "all-reduce": cell("{:.0f} MB/s", worker.get("all_reduce_mb_s")),
        "memory for snapshots": cell("{}", worker.get("memory")),
    }


def cell(text: str, value: Any) -> str:
    """A fact as it is shown; NOTHING where it is not known."""
    return NOTHING if value is None else text.format(value)
