"""torchrun's rendezvous handler: agents agree on a round, and learn when the round has to end for a new one.

A round begins when agents agree to start workers together, and lasts until the next restart. The leader, the
agent with the smallest address, proposes a round to agents that all reach each other. The round starts if all
these agents accept. The ranks of the nodes are in the order of the agents' addresses. Workers find the job's
token in MINGPT_JOB and the number of the round in MINGPT_ROUND.

Workers share a torch TCPStore, which the leader hosts. The agents themselves share no store, because a store
would be lost with its host. Every agent computes the ranks of all workers, so agents need no store.
"""

import atexit
import json
import os
import platform
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from mingpt.base.errors import UserError
from mingpt.base.files import temporary_folder
from mingpt.distributed.exit import write_stderr
from mingpt.distributed.launch import AGENT_FOLDER, JOB, MEMORY_FILE, ROUND
from mingpt.launch.elastic import decisions
from mingpt.launch.elastic.boards import (
    Board,
    BoardMemory,
    Endpoint,
    FolderBoard,
    HostBoard,
    Message,
    Server,
    parse_rdzv,
    request,
    serve_once_free,
)
from mingpt.launch.elastic.decisions import FINISHED, LEFT, Entry, Round
from mingpt.launch.elastic.node import Meeting, Node
from mingpt.snapshot.memory import LEFT_TO_AGENT, remove_run

PROPOSAL_TIMEOUT_S = 2.0
STORE_TIMEOUT_S = 10.0
LINGER_S = 2.0  # time for others to read that the job is finished
NOTICE_S = 0.3  # time for others to read that this agent has left
EXIT_S = 1.0  # the longest wait for a board to take the last post
POLL_S = 0.05
RETRY_S = (0.1, 0.3)  # wait after a failed proposal; random, because two leaders may be in each other's way


def assigned_ranks(nprocs: Sequence[int]) -> dict[str, str]:
    """Return {key: value}: the ranks of all workers, as torchrun's agents would write them to a shared store.

    `nprocs` has the number of workers of each node, by the nodes' ranks. All workers have the same role.
    """
    found, total = {}, sum(nprocs)
    for rank, nproc in enumerate(nprocs):
        base = sum(nprocs[:rank])
        info = {"role": "", "rank": rank, "local_world_size": nproc}
        found[f"torchelastic/role_info/{rank}"] = json.dumps(info)
        found[f"torchelastic/assigned_ranks/{rank}"] = json.dumps([base, total, base, total])
    return found


class RoundStore(HashStore):
    """A store in the memory of one of torchrun's agents, so that the agent can never lose the store.

    `known`, {key: value}, is in the store from the start: the workers' ranks, which torchrun's agents would
    otherwise exchange. torchrun's agents call `wait` to wait for each other at the job's end. Here `wait`
    returns at once, because a worker exits with 0 only when all workers have ended the job.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__()
        for key, value in known.items():
            self.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Do nothing: an agent calls this to write the workers' ranks, which are in the store already."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return at once. torchrun's agent calls this when its workers have finished."""


class ElasticRendezvous(RendezvousHandler):
    """The rendezvous of elastic jobs: agents meet in a folder, or at several hosts of which one must live.

    The constructor raises UserError if the endpoint is neither HOST:PORT[,HOST:PORT...] nor a path with a
    slash. Also raises UserError if --rdzv_conf has no nproc, the number of workers on this node.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        # Imported here: torch's launcher imports this file, a plugin, while the launcher is being imported.
        from torch.distributed.run import determine_local_world_size

        self._run_id, self._min, self._max = params.run_id, params.min_nodes, params.max_nodes
        self._address = params.local_addr or socket.gethostbyname(platform.node())
        rdzv = parse_rdzv(params.endpoint)
        endpoints = [] if isinstance(rdzv, Path) else rdzv
        nproc = params.get("nproc")
        if not nproc:
            raise UserError("--rdzv_backend=mingpt needs --rdzv_conf=nproc=N: start it by launch/elastic.sh")
        self._node = Node(platform.node(), self._address, determine_local_world_size(nproc))
        self._tcp_store: TCPStore | None = None
        self._restart: decisions.Restart | None = None
        self._restart_since = 0.0
        operations = self._node.operations() | {"post": BoardMemory().post}
        port = own_port(endpoints, self._address)
        try:
            server = Server(self._address, port, operations)
        except OSError as error:
            self._say(
                f"port {port} is taken ({error.strerror}); this node cannot host the rendezvous for now"
            )
            server = Server(self._address, 0, operations)
            threading.Thread(
                target=serve_once_free, args=(self._address, port, operations), daemon=True
            ).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        boards: list[Board] = (
            [FolderBoard(rdzv, self._run_id)]
            if isinstance(rdzv, Path)
            else [HostBoard(host, port, self._run_id) for host, port in rdzv]
        )
        # Made before `_leave` is registered, so that the folder is removed after `_leave` has run.
        self._folder = temporary_folder(AGENT_FOLDER)
        self._memory_file = Path(self._folder.name) / "memory"
        os.environ[MEMORY_FILE] = str(self._memory_file)
        self._node.start(server.port, boards)
        atexit.register(flush_stderr)
        atexit.register(self._leave)

    def _say(self, text: str) -> None:
        write_stderr(f"[rendezvous] {platform.node()} ({self._address}): {text}\n")

    def get_backend(self) -> str:
        return "mingpt"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait, without a time limit, until a round with this agent starts; return its RendezvousInfo.

        If this agent leads, it proposes the round. If the job is finished, removes the memory snapshots of
        this agent's workers and raises SystemExit(0).
        """
        self._node.wait_for_round()
        self._restart = None
        meeting, said = Meeting(self._min, self._max, began=time.monotonic()), ""
        while True:
            round = self._node.entered
            if round is not None:
                return self._start(round)
            view, now = self._node.view(), time.monotonic()
            if view.finished:
                self._say("the job is finished")
                self._free_memory()
                raise SystemExit(0)
            group = meeting.group_to_propose(view, now)
            if group is not None:
                failure = self._propose(group)
                if failure:
                    if failure != said:
                        said = failure
                        self._say(f"{failure}; retrying")
                    time.sleep(random.uniform(*RETRY_S))
                continue
            line = meeting.line_to_say(view, now)
            if line is not None:
                self._say(line)
            time.sleep(POLL_S)

    def _propose(self, group: Sequence[Entry]) -> str:
        """Propose a round to `group`, and start the round if all agents of the group accept it.

        Returns "" if the round started, else a text that says why it did not.
        """
        number, job = decisions.job_of(group)
        members = tuple(replace(entry, members=(), reach=()) for entry in group)  # without the long lists
        round = Round(uuid.uuid4().hex, number + 1, job or uuid.uuid4().hex, members, self._host_store())
        has_promised = self._node.promise(round)
        if not has_promised:
            return "this agent has accepted another proposal"
        answers = self._ask_all(group[1:], {"op": "propose", "round": asdict(round)})
        refusals = [str(entry) for entry, is_ok in zip(group[1:], answers, strict=True) if not is_ok]
        if refusals:
            self._node.release(round)
            return f"{', '.join(refusals)} did not accept the round"
        has_entered = self._node.enter(round)
        if not has_entered:
            return "the answers to a proposal took too long"
        self._ask_all(group[1:], {"op": "go", "round": asdict(round)})
        return ""  # an agent that has not heard "go" still waits, which the others see

    def _ask_all(self, others: Sequence[Entry], message: Message) -> list[bool]:
        def ask(entry: Entry) -> bool:
            try:
                return request(entry.address, entry.port, message, PROPOSAL_TIMEOUT_S).get("ok") is True
            except OSError:
                return False

        with ThreadPoolExecutor(max(1, len(others))) as threads:
            return list(threads.map(ask, others))

    def _host_store(self) -> int:
        """Return the port of the workers' TCPStore on this node.

        The first call starts the store, which runs as long as this agent.
        """
        if self._tcp_store is None:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((self._address, 0))  # TCPStore by itself listens on every address
            listener.listen(1024)
            self._tcp_store = TCPStore(
                self._address,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                master_listen_fd=listener.detach(),
            )
        return self._tcp_store.port

    def _start(self, round: Round) -> RendezvousInfo:
        os.environ[JOB], os.environ[ROUND] = round.job, str(round.number)
        self._say(f"round {round.number}: {decisions.list_nodes(round.members)}")
        known = assigned_ranks([member.nproc for member in round.members])
        store = RoundStore(known)
        rank = [member.id for member in round.members].index(self._node.id)
        bootstrap = RendezvousStoreInfo(round.members[0].address, round.store_port)
        return RendezvousInfo(store, rank, len(round.members), bootstrap)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round has to end, so that torchrun's agent restarts its workers, else 0."""
        view, now = self._node.view(), time.monotonic()
        restart = None
        if view.is_fresh:
            restart = decisions.must_restart(view.me, view.alive, self._max)
        if restart != self._restart:
            self._restart, self._restart_since = restart, now
        if restart is None or now - self._restart_since < restart.hold_s:
            return 0
        self._say(f"the round ends: {restart.reason}")
        return 1

    def is_closed(self) -> bool:
        return self._node.view().finished

    def set_closed(self) -> None:
        self._node.end(FINISHED, EXIT_S)

    def shutdown(self) -> bool:
        """Post that the job is FINISHED, and give the other agents up to LINGER_S seconds to read that.

        If an exception is being handled, post nothing: the job goes on without this agent. Returns True.
        """
        if sys.exc_info()[0] is None:
            atexit.unregister(self._leave)  # the entry stays for agents that are frozen or cut off
            self._node.end(FINISHED, EXIT_S)
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and any(
                entry.id != self._node.id for entry in self._node.view().alive
            ):
                time.sleep(POLL_S)
        return True

    def _free_memory(self, only_left: bool = False) -> None:
        """Remove the memory snapshots of this agent's workers, because this agent starts no more workers.

        With `only_left`, remove the snapshots only if the last workers kept them on purpose for a restart.
        """
        if self._memory_file.exists():
            root = Path(self._memory_file.read_text())
            if not only_left or (root / LEFT_TO_AGENT).exists():
                remove_run(root)

    def _leave(self) -> None:
        self._node.end(LEFT, EXIT_S)
        self._free_memory(only_left=True)
        time.sleep(NOTICE_S)


def own_port(endpoints: Sequence[Endpoint], address: str) -> int:
    """Return the port of the endpoint whose host has `address`, this node's address; 0 if no host has it."""
    for host, port in endpoints:
        try:
            found = {info[4][0] for info in socket.getaddrinfo(host, port)}
        except (OSError, UnicodeError):
            continue  # the name may be that of a node that has not started
        if address in found:
            return port
    return 0


def flush_stderr() -> None:
    """Flush stderr at this process's exit, before Python flushes it.

    If nobody reads stderr any more, replace stderr with /dev/null; otherwise Python would exit with 120.
    """
    try:
        sys.stderr.flush()
    except OSError:  # the reader of stderr is gone, as srun is when the first node is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
