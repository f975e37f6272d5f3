"""Check exercise 5: workers that agree on a name which no generation before them has had."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutorial.checks.processes import Place, Process, Refused, TimedOut, name_ranks, wait_for_all

WRITES = ("set", "add", "append", "compare_set", "delete_key", "multi_set")
KILLS_PER_RANK = 3
HEAD_START_S = 0.2  # a `meet` that need not wait for others takes a few ms
Kill = tuple[int, int]  # the rank, and the number of the write before which it is killed
NOBODY: Kill = (-1, -1)
servers: list[dist.TCPStore] = []  # in the process of the store


def serve(place: Place) -> int:
    """Begin to serve the store, which outlives all workers. Returns the port."""
    servers.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return servers[0].port


class WatchedStore(dist.TCPStore):
    """A client that records writes, and kills its process before write number `kill_at`, from 0."""

    def __init__(self, port: int, kill_at: int) -> None:
        super().__init__("127.0.0.1", port)
        self.writes, self.kill_at = list[str](), kill_at
        for name in WRITES:
            setattr(self, name, self.record(name, getattr(self, name)))

    def record(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(key: Any, *arguments: Any) -> Any:
            if len(self.writes) == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.writes.append(f"{name}({key!r})")
            return original(key, *arguments)

        return write


def task(
    place: Place, port: int, restarts: list[int], late: Sequence[int], kill: Kill, join: bool
) -> tuple[str, list[str]]:
    """The name that this worker gets, and what it has written. `late` ranks begin after the others."""
    os.environ |= {"RANK": f"{place.rank}", "WORLD_SIZE": f"{place.world_size}", "TORCHELASTIC_RUN_ID": "job"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{restarts[place.rank]}"
    store = WatchedStore(port, kill[1] if place.rank == kill[0] else -1)
    meet = place.load("meet")
    if place.rank in late:
        early = [place.folder / f"begun-{rank}" for rank in range(place.world_size) if rank not in late]
        while not all(path.exists() for path in early):
            time.sleep(0.005)
        time.sleep(HEAD_START_S)
    (place.folder / f"begun-{place.rank}").touch()
    name = meet(store, place.rank, place.world_size)
    if not isinstance(name, str) or not name:
        raise Refused(f"meet returned {name!r}; it has to return a name")
    if join:
        keys = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=keys, rank=place.rank, world_size=place.world_size)
        dist.all_reduce(torch.ones(1))
    return name, store.writes


class Job:
    """Generations of workers with one store."""

    def __init__(self, answer: Path, port: int) -> None:
        self.answer, self.port = answer, port
        self.generations = 0
        self.names = dict[str, int]()  # those of workers until now, with their generation

    def run(
        self, world_size: int, late: Sequence[int] = (), kill: Kill = NOBODY, join: bool = False
    ) -> list[tuple[str, list[str]]]:
        """One generation. If somebody is killed, nothing is returned, and all are killed soon after."""
        workers: list[Process] = []
        # Rank 0 is on one node, the others are on another: a death is counted by the agent of its node.
        restarts = [self.generations // 2] + [(self.generations + 1) // 2] * (world_size - 1)
        self.generations += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(world_size):
                    place = Place(self.answer, Path(folder), rank, world_size)
                    workers.append(Process(place, task, self.port, restarts, late, kill, join))
                if kill == NOBODY:
                    return wait_for_all(workers)
                workers[kill[0]].wait()
                time.sleep(0.1)  # the others go on meanwhile
                names = [worker.value[0] for worker in workers if worker.poll() == "done"]
                self.names |= dict.fromkeys(names, self.generations - 1)
                return []
            finally:
                for worker in workers:
                    worker.kill()

    def meet(
        self, world_size: int, late: Sequence[int] = (), after: str = "", join: bool = False
    ) -> list[list[str]]:
        """A generation that is not disturbed. Returns the writes of its ranks, or raises Refused."""
        text = f"Generation {self.generations}{after}, {world_size} workers"
        text += f", {name_ranks(late)} late:" if late else ":"
        try:
            found = self.run(world_size, late, join=join)
        except Refused as refusal:
            hint = " Has another rank taken a dead worker's key for a new one?"
            raise Refused(f"{text} {refusal}{hint * isinstance(refusal, TimedOut)}") from None
        names = [name for name, _ in found]
        old = [rank for rank, name in enumerate(names) if name in self.names]
        shown = ", ".join(name[:8] for name in names)
        problem = "" if len(set(names)) == 1 else f" The ranks have different names, {shown}."
        if old:
            problem += f" The name of {name_ranks(old)} is that of generation {self.names[names[old[0]]]}, "
            problem += "left in the store by a dead worker, or made from a number that is not new."
        if problem:
            raise Refused(text + problem)
        self.names[names[0]] = self.generations - 1
        return [writes for _, writes in found]


def check_job(answer: Path, port: int) -> str:
    job = Job(answer, port)
    writes = job.meet(3)
    job.meet(3, late=[0])
    job.meet(3, late=[1, 2])
    job.meet(2, late=[1])
    for rank in (0, 1):
        for index, write in enumerate(list(dict.fromkeys(writes[rank]))[:KILLS_PER_RANK]):
            number, late = writes[rank].index(write), [1, 2] if rank and index % 2 else [0]
            job.run(3, kill=(rank, number))
            job.meet(3, late, f", after rank {rank} was killed before its write {number}, {write}")
    job.meet(4, late=[0, 2], join=True)
    return f"{job.generations} generations began, and each that was not killed has a name of its own."


def check(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        server = Process(Place(answer, Path(folder), 0, 1), serve)
        try:
            return check_job(answer, wait_for_all([server])[0])
        finally:
            server.kill()
