"""What one worker finds out about itself and its node, without asking any other."""

import contextlib
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.system import start
from mingpt.config import Config, flatten, settings, to_dict
from mingpt.data import is_shards, make_corpus, open_shards, read_bytes
from mingpt.distributed import Launch
from mingpt.model import parameter_shapes
from mingpt.optim import state_shapes
from mingpt.snapshot import SnapshotStore

FLOAT_BYTES = 4
VOCABULARY_UNREAD = 256  # tokens, where the text has not been read: only the state's size depends on it
CGROUP, MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


@dataclass(frozen=True)
class Facts:
    """Of one worker; plain values that travel as JSON. An `error` is a reason in words, None if all is well.

    Of a node as a whole (data, folders, memory) only its first worker, local rank 0, finds anything out.
    """

    rank: int
    node: int
    host: str
    local_rank: int = 0
    local_world_size: int = 1
    torch: str = ""
    threads: int = 1
    device: str = ""
    device_type: str = ""
    device_error: str | None = None
    config: dict[str, Any] = field(default_factory=dict)  # the settings that affect the result
    config_error: str | None = None
    unfinished: str | None = None  # what did not end in time, or failed
    data_path: str = ""
    data: str | None = None  # SHA-256; None: not read, as of a URL
    data_error: str | None = None
    folders: dict[str, str | None] = field(default_factory=dict)  # "run_dir out/default" -> error
    probe: str = ""  # the name of the file that this node has written to the last of these folders
    made: list[str] = field(default_factory=list)  # folders that were missing before
    sees: list[str] = field(default_factory=list)  # the probes of other nodes there
    state_bytes: int | None = None  # of model and optimizer
    memory_path: str | None = None  # None: no snapshots in memory are asked for
    memory_free: int | None = None
    memory_error: str | None = None
    ram_free: int | None = None
    networks: dict[str, str] = field(default_factory=dict)  # interface -> "10.0.0.2/24"
    address: str | None = None  # on which it listens
    address_error: str | None = None
    ports: str = ""  # of listeners, "32768-60999"
    unreachable: dict[int, str] = field(default_factory=dict)  # rank -> why a connection to it failed
    clock_s: float | None = None  # ahead of rank 0's clock
    all_reduce_mb_s: float | None = None
    all_reduce_error: str | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Facts":
        ranks = {int(rank): reason for rank, reason in content["unreachable"].items()}
        return cls(**(content | {"unreachable": ranks}))


def node_names(workers: Sequence[Facts]) -> dict[int, str]:
    """{rank: name of its node}: the host name, with the node's number where several nodes share the name."""
    nodes: dict[str, set[int]] = {}
    for worker in workers:
        nodes.setdefault(worker.host, set()).add(worker.node)
    return {
        worker.rank: worker.host if len(nodes[worker.host]) == 1 else f"{worker.host} (node {worker.node})"
        for worker in workers
    }


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

    def share(self, sees: Sequence[str], workers: Iterable[dict[str, Any]]) -> None:
        """Take over what others have made whose probes are seen here: Facts as JSON."""
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


def identity(launch: Launch) -> dict[str, Any]:
    """The fields of Facts that say which worker it is."""
    return {
        "rank": launch.rank,
        "node": launch.node_rank,
        "host": platform.node(),
        "local_rank": launch.local_rank,
        "local_world_size": launch.local_world_size,
    }


def find_own(launch: Launch, config: Config | None) -> dict[str, Any]:
    """The fields of Facts that need no look at the disk."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__}
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


def find_data(config: Config) -> dict[str, Any]:
    """The text's fingerprint, if its path is on this node, and the size of the state of the model for it."""
    found: dict[str, Any] = {"data_path": config.data.path}
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
    found["state_bytes"] = state_bytes(config, vocabulary)
    return found


def state_bytes(config: Config, vocab_size: int) -> int:
    """Bytes of model and optimizer, as a snapshot holds them."""
    weights = parameter_shapes(config.model, vocab_size=vocab_size, block_size=config.data.block_size)
    sizes = [*weights.values(), *state_shapes(weights, config.optimizer).values()]
    return FLOAT_BYTES * sum(product(shape) for shape in sizes)


def product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def find_memory(config: Config) -> dict[str, Any]:
    """Free bytes for snapshots in memory, and of the host."""
    found: dict[str, Any] = {"ram_free": free_ram(MEMINFO, CGROUP)}
    if config.snapshot.memory_every:
        found["memory_path"] = config.snapshot.memory_path
        try:
            space = os.statvfs(config.snapshot.memory_path)
            found["memory_free"] = space.f_bavail * space.f_frsize
        except OSError as error:
            found["memory_error"] = reason_of(error)
    return found


def free_ram(meminfo: Path, cgroup: Path) -> int | None:
    """Bytes that a new process may take: the host's, or what the cgroup (v2) of this container leaves."""
    free: list[int] = []
    try:
        (line,) = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        free.append(1024 * int(line.split()[1]))
    except (OSError, ValueError):
        pass  # no Linux
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text()
        if limit != "max":
            stats = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            free.append(int(limit) - int(used) + int(stats["inactive_file"]))
    except (OSError, ValueError, KeyError):
        pass  # no cgroup v2, or not limited here
    return min(free, default=None)


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

    def take(self, deadline: float) -> dict[str, Any]:
        """What has been found by then, in the clock of time.monotonic."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.doing is None:
            return dict(self.found)
        reason = self.error or f"not done after {time.monotonic() - self.began_at:.0f} s"
        return self.found | {"unfinished": f"{self.doing}: {reason}"}
