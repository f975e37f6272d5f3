"""What a rank finds out when a generation (the workers between two restarts) starts, and what the rank opens.

A `Site` belongs to one rank. It gathers facts, from which `plan.py` makes a plan, and `start.py` carries the
plan out. Without trainer.eval_only, Sites also make the run folder, log.txt, the claim (a job's right to
write there), and probes: files by which nodes find out which folders they share.
"""

import contextlib
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mingpt.base.errors import CorruptSnapshot, UserError, meaning_of
from mingpt.base.files import remove_quietly, write_atomic
from mingpt.base.paths import describe_obstacle
from mingpt.base.processes import Process, this_process
from mingpt.base.system import OutOfTime, run_within
from mingpt.config import Config
from mingpt.data import Data, TextData
from mingpt.data.corpus import open_data, tokenizer_file
from mingpt.distributed import DistributedContext
from mingpt.distributed.context import Own
from mingpt.distributed.device import find_program
from mingpt.report import load_history, open_log, read_job_start
from mingpt.snapshot import Entries, Manifest, Store
from mingpt.snapshot.claim import Claim, Holder
from mingpt.snapshot.memory import run_folders
from mingpt.snapshot.search import Reader
from mingpt.training.contents import check_model
from mingpt.training.plan import Fault, Place, Records, StartFacts

DISK_S = 60.0  # seconds within which a disk must answer, else the start is refused
OWN_HISTORY = re.compile(rb'\s*{\s*"id": ?"[0-9a-f]{32}"')  # how a run's run.json begins, also if damaged
HISTORY_FILES = ("metrics.jsonl", "run.json")  # run.json last: it shows that there is a run
REPLACED_FILES = ("run.json", "config.yaml", "metrics.jsonl", "loss.png")
log = logging.getLogger(__name__)
MAX_WINDOWS = 2**62  # a run that goes on counts up, and a manifest takes numbers below 2**63


class Arrival(NamedTuple):
    """What a rank finds out first, such as its device. Other facts come after an exchange of all Arrivals."""

    own: Own  # the rank's device and place
    agent: Process
    probes: tuple[str, str]  # files in the run folder, and in that of snapshots; "" if this rank made none
    faults: list[Fault]


class Site:
    """What one rank opens when a generation starts: the run folder, its claim, the snapshots and the data."""

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config, self.context, self.launch = config, context, context.launch
        self.path, self.is_first = Path(config.run_dir), context.launch.local_rank == 0
        self.store_url = config.snapshot.path or str(self.path / "snapshots")
        self.writes = not config.trainer.eval_only
        self.probes = "", ""  # the names of the files by which other nodes know this rank's folders
        self.data: Data | None = None
        self.reader = Reader([], self.check, context.rank)  # reads no snapshots if a rank has a fault

    def arrive(self) -> Arrival:
        """Find this rank's device, make the run folder and probes, and return the Arrival, with its faults.

        Probes are files by which several nodes find out which folders they share. If there are several nodes,
        each node's first rank makes them, unless it has a fault. With trainer.eval_only, nothing is made.
        """
        faults = list[Fault]()
        own = self.context.find_own(self.config.trainer.device, self.config.trainer.dtype)
        if own.fault:
            faults.append(Fault("device", {"reason": own.fault}))
        if self.writes:
            faults += self.try_disks() or self.check_is_ours() or self.make_run_dir()
        if self.writes and not faults and self.launch.has_several_nodes and self.is_first:
            is_folder = "://" not in self.store_url
            self.probes = write_probe(self.path), write_probe(Path(self.store_url)) if is_folder else ""
        return Arrival(own, this_process(self.launch.agent_pid), self.probes, faults)

    def remove_probes(self) -> None:
        """Remove the probe files that this rank has made for `look`, which must have ended on all ranks."""
        for folder, name in zip((self.path, Path(self.store_url)), self.probes, strict=True):
            if name:
                remove_quietly(folder / name)

    def try_disks(self) -> list[Fault]:
        """Return a fault if the disk of run_dir, snapshot.path or data.path is silent for DISK_S seconds."""
        for place in (self.config.run_dir, self.config.snapshot.path, self.config.data.path):
            if place is not None and "://" not in place:
                try:
                    run_within(DISK_S, partial(os.path.exists, place))
                except OutOfTime:
                    return [Fault("disk", {"place": place, "limit_s": DISK_S}, may_pass=True)]
        return []

    def check_is_ours(self) -> list[Fault]:
        """Return a fault if the run folder has files that a run replaces, and no readable run.json of a run.

        Empty files do not count: a run that starts on a full disk leaves an empty metrics.jsonl.
        """
        found = [name for name in REPLACED_FILES if holds_something(self.path / name)]
        if not found:
            return []
        if os.path.isfile(self.path / "run.json"):  # opening a pipe, for example, would block
            with contextlib.suppress(OSError), (self.path / "run.json").open("rb") as file:
                if OWN_HISTORY.match(file.read(100)):
                    return []
        return [Fault("not ours", {"run_dir": self.path, "names": ", ".join(found)})]

    def make_run_dir(self) -> list[Fault]:
        """Make the run folder, and open log.txt there for writing. Return a fault if either fails.

        If the folder exists, and its disk is full, there is no fault, and log.txt may be missing.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "log.txt").open("a").close()
        except OSError as error:
            if meaning_of(error) == "full" and self.path.is_dir():
                return []  # each file that cannot be written will be reported, and tried again
            return [self.not_writable(error)]
        return []

    def not_writable(self, error: OSError) -> Fault:
        reason = describe_obstacle(self.path, error)
        may_pass = meaning_of(error) in ("full", "may pass")
        return Fault("not writable", {"run_dir": self.path, "reason": reason}, may_pass)

    def look(self, arrivals: Sequence[Arrival]) -> StartFacts:
        """Claim the run folder if this rank writes there, open the snapshots and data, and return the facts.

        `arrivals` has the Arrivals of all ranks, in order. The facts have this rank's faults, if any. A rank
        with a fault looks for no snapshots. The others go on, because the job may go on without its node.
        """
        own, rank = arrivals[self.context.rank], self.context.rank
        agents = tuple(dict.fromkeys(arrival.agent for arrival in arrivals))
        job, generation = self.launch.job or uuid.uuid4().hex, uuid.uuid4().hex
        self.claim = Claim(self.path, Holder(agents, job, generation, since=time.time()))
        self.context.exit.on_job_end(self.claim.release)
        facts = StartFacts(
            config=self.config,
            node=self.launch.node_rank,
            host=own.own.place.host,
            device=own.own.device.type if own.own.device else "",
            dtype=own.own.dtype,
            threads=self.launch.threads(self.config.trainer.threads),
            program=find_program() if self.launch.has_several_nodes else "",
            faults=own.faults,
            was_restarted=self.context.was_started(),
            round=self.launch.rdzv_round or 1,
            url=self.store_url,
            token=uuid.uuid4().hex,
        )
        if own.faults:
            return facts
        run_probes, snapshot_probes = zip(*(arrival.probes for arrival in arrivals), strict=True)
        keeper = snapshot_keeper = lowest_rank_there(self.path, run_probes)
        if self.config.snapshot.path is not None:
            is_folder = "://" not in self.store_url
            snapshot_keeper = lowest_rank_there(Path(self.store_url), snapshot_probes) if is_folder else 0
        self.is_kept = self.writes and keeper == rank
        self.keeps_snapshots = self.writes and snapshot_keeper == rank
        faults = [*self.acquire(), *self.open_store(), *self.open_data(is_needed=self.is_first)]
        open_log(rank, self.path if self.is_kept else None, self.claim.may_write)
        facts = replace(
            facts,
            keeper=keeper,
            snapshot_keeper=snapshot_keeper,
            records=records_of(self.path, self.claim.holder.job),
            data=self.data.fingerprint if self.data else "",
            tokenizer=str(tokenizer_file(self.data) or "") if self.data else "",
        )
        return replace(facts, faults=faults) if faults else self.look_for_snapshots(facts)

    def acquire(self) -> list[Fault]:
        """If this rank writes the run's records, call `Claim.acquire`; return a fault if that fails."""
        try:
            if self.is_kept:
                self.claim.acquire()
        except OSError as error:
            return [self.not_writable(error)]
        except UserError as error:
            return [Fault("claimed", {"reason": error})]
        return []

    def open_store(self) -> list[Fault]:
        """Construct the Store, whose writes check the claim; return a fault if its URL cannot be used."""
        try:
            self.store = Store(self.store_url, check_claim=self.claim.check)
        except UserError as error:
            return [Fault("snapshots", {"reason": error})]
        if self.store.is_process_private and self.launch.is_distributed:
            return [Fault("private", {"url": self.store_url})]
        return []

    def open_data(self, is_needed: bool = True) -> list[Fault]:
        """Open the data, unless they are open already; return a fault if they cannot be used.

        Data at a URL are opened only if `is_needed`: first on one rank of each node, which fills the cache.
        """
        if self.data is None and (is_needed or "://" not in self.config.data.path):
            try:
                self.data = open_data(self.config.data)
            except UserError as error:
                return [Fault("data", {"reason": error}, error.may_pass)]
        return []

    def look_for_snapshots(self, facts: StartFacts) -> StartFacts:
        """Return `facts` with what `offer` adds; only a node's first rank looks for snapshots to offer."""
        stores = []
        if self.is_first:
            in_memory = run_folders(self.config.snapshot.memory_path, self.path)
            stores = [self.store, *(store for folder in in_memory for store in folder.stores())]
        self.reader = Reader(stores, self.check, self.context.rank)
        return self.offer(facts, {})

    def offer(self, facts: StartFacts, faults: Mapping[Place, Exception]) -> StartFacts:
        """Return `facts` with this rank's offers, now that the snapshots in `faults` must not be used.

        If a snapshot raises UserError, such as for an unknown schema version, adds a Fault instead of offers.
        """
        for (rank, store, step), error in faults.items():
            if rank == self.context.rank:
                self.reader.reject(store, step, error)
        try:
            offers = self.reader.offers()
        except UserError as error:
            return replace(facts, faults=[Fault("snapshots", {"reason": error})])
        return replace(facts, offers=offers)

    def check(self, manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
        """Raise CorruptSnapshot for a snapshot that a run must not use, such as one without a tokenizer.

        For the arguments and further errors see `check_model`.
        """
        check_model(manifest, entries, tokenizer)
        if manifest.windows >= MAX_WINDOWS:
            raise CorruptSnapshot(f"no run reads {manifest.windows} windows")
        assert self.data
        lacks_tokenizer = manifest.tokenizer.kind == "none" and isinstance(self.data, TextData)
        if lacks_tokenizer and manifest.data.sha256 == self.data.fingerprint:
            raise CorruptSnapshot("it lacks the tokenizer of the text")

    def read_history(self) -> dict[str, bytes]:
        """Return {name: content} of metrics.jsonl and run.json; b"" for a missing file. May raise OSError."""
        paths = [self.path / name for name in HISTORY_FILES]
        # A run that died at once has no records.
        return {path.name: path.read_bytes() if path.exists() else b"" for path in paths}

    def write_history(self, contents: Mapping[str, bytes]) -> None:
        """Write another node's records to this node's run folder. A failure is only logged."""
        try:
            for name, content in contents.items():
                write_atomic(self.path / name, content, sync="file")
        except OSError as error:
            log.warning(f"{self.path} cannot be written ({error.strerror}): its records have a gap")


def holds_something(path: Path) -> bool:
    """Return whether anything but an empty file is seen at `path`. A link counts, wherever it leads."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_size > 0 or not stat.S_ISREG(status.st_mode)


def write_probe(folder: Path) -> str:
    """Make a file in `folder`, which is made if missing; return the file's name, or "" if that fails.

    A failure is logged. The name is new, because network file systems remember which files were missing.
    """
    probe = folder / f"probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        log.info(f"{probe} cannot be created ({error.strerror}): taken for the folder that rank 0 sees")
        return ""
    return probe.name


def lowest_rank_there(folder: Path, probes: Sequence[str]) -> int:
    """Return the lowest rank whose file, named `probes[rank]`, is in `folder`; 0 if there is none."""
    seen = (rank for rank, name in enumerate(probes) if name and os.path.exists(folder / name))
    return next(seen, 0)


def records_of(path: Path, job: str) -> Records:
    """Return what run.json in the folder `path` says about a run; `job` is the present job's random id."""
    history = load_history(path)
    if history is None:
        return Records()
    generations = history["generations"]
    return Records(
        of_this_job=history.get("job") == job,
        last_step=generations[-1]["to_step"] if generations else -1,
        run=history["id"] if generations else None,
        job_start=read_job_start(history),
        durable_step=history.get("durable_step", 0),
        distrusted=history.get("distrusted", []),
        generations=len(generations),
        is_reported=history.get("status") != "running",
        settings=history.get("settings", ""),
    )
