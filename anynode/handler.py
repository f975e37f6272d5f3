"""torchrun's rendezvous handler: agents agree on a round, and learn when the round has to end for a new one.

A round begins when agents agree to start workers together, and lasts until the next restart. In a group of
agents that all reach each other, the leader, the agent with the smallest address, proposes a round. The round
starts if the whole group accepts in time. The ranks of the nodes are in the order of the agents' addresses.

The workers of a round share a torch TCPStore, which the leader hosts. The store is new in each round, because
keys that dead workers left would mislead their successors. The agents themselves share no store, because a
store would be lost with its host. They need none, because each agent computes the ranks of all workers.
"""

import atexit
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from anynode import JOB, ROUND, STORE_PORT, decisions
from anynode.boards import (
    Board,
    BoardMemory,
    Endpoint,
    FolderBoard,
    HostBoard,
    Server,
    parse_rdzv,
    serve_once_free,
)
from anynode.command import write_stderr
from anynode.decisions import FINISHED, LEFT, RUNNING, Round
from anynode.node import Meeting, Node, Watch, run_task

STORE_TIMEOUT_S = 10.0
LINGER_S = 2.0  # time for others to read that the job is finished
FINISH_S = 300.0  # time for workers of other nodes to finish, too; torchrun's own limit is the same
NOTICE_S = 0.3  # time for others to read that this agent has left
EXIT_S = 1.0  # the longest wait for a board to take the last post
POLL_S = 0.05


def assigned_ranks(nprocs: Sequence[int]) -> dict[str, str]:
    """Return {key: value}: the ranks of all workers, under the keys where torchrun's agents look for them.

    `nprocs` has the number of workers of each node, by the nodes' ranks. All workers must have the same role.
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
    returns at once, because `AnyNodeRendezvous.shutdown` waits for the other agents.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__()
        for key, value in known.items():
            self.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Do nothing: an agent calls this to write the workers' ranks, which are in the store already."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return at once. torchrun's agent calls this when its workers have finished."""


class AnyNodeRendezvous(RendezvousHandler):
    """The rendezvous `anynode`: agents meet in a folder, or at a list of hosts of which one must live.

    The constructor raises ValueError if the endpoint is neither HOST:PORT[,HOST:PORT...] nor a path with a
    slash. Also raises the errors of `local_workers`, and OSError if this node's address cannot be found,
    or if this process cannot listen there.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._backend, self._run_id = params.backend, params.run_id
        self._min, self._max = params.min_nodes, params.max_nodes
        self._address = params.local_addr or socket.gethostbyname(platform.node())
        rdzv = parse_rdzv(params.endpoint)
        endpoints = [] if isinstance(rdzv, Path) else rdzv
        self._node = Node(platform.node(), self._address, local_workers(params))
        self._job_store: TCPStore | None = None
        self._round_store: TCPStore | None = None
        self._watch = Watch(self._max)
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
        self._node.start(server.port, boards)
        atexit.register(write_stderr, "")
        atexit.register(self._leave)

    def _say(self, text: str) -> None:
        write_stderr(f"[rendezvous] {platform.node()} ({self._address}): {text}\n")

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait, without a time limit, until a round with this agent starts; return the RendezvousInfo.

        If this agent leads, it proposes the round. If the job is finished, raises SystemExit(0).
        """
        self._node.wait_for_round()
        self._round_store = None
        self._watch = Watch(self._max)
        meeting = Meeting(self._min, self._max, began=time.monotonic())
        round = run_task(meeting.meet(self._node, self._host_stores, self._say))
        if round is None:
            self._say("the job is finished")
            raise SystemExit(0)
        return self._start(round)

    def _host_stores(self) -> tuple[int, int]:
        """Start a TCPStore for a round and one for the job, unless they run; return their ports.

        Only a leader calls this, when it proposes a round.
        """
        # The job's store runs as long as this agent, a round's store until this agent's next rendezvous.
        self._job_store = self._job_store or self._host_store()
        self._round_store = self._round_store or self._host_store()
        return self._round_store.port, self._job_store.port

    def _host_store(self) -> TCPStore:
        """Start a TCPStore that listens at this node's address, on a free port."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((self._address, 0))  # TCPStore by itself listens on every address
        listener.listen(1024)
        return TCPStore(
            self._address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )

    def _start(self, round: Round) -> RendezvousInfo:
        os.environ |= {JOB: round.job, ROUND: str(round.number), STORE_PORT: str(round.job_store_port)}
        self._say(f"round {round.number}: {decisions.list_nodes(round.members)}")
        known = assigned_ranks([member.nproc for member in round.members])
        store = RoundStore(known)
        rank = [member.id for member in round.members].index(self._node.id)
        bootstrap = RendezvousStoreInfo(round.members[0].address, round.store_port)
        return RendezvousInfo(store, rank, len(round.members), bootstrap)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round has to end, so that torchrun's agent restarts its workers, else 0."""
        reason = self._watch.reason_to_end(self._node.view(), time.monotonic())
        if reason:
            self._say(f"the round ends: {reason}")
        return 1 if reason else 0

    def is_closed(self) -> bool:
        return self._node.view().finished

    def set_closed(self) -> None:
        self._node.end(FINISHED, EXIT_S)

    def shutdown(self) -> bool:
        """Post that the job is FINISHED, and give the other agents time to read that and to finish, too.

        The time is up to FINISH_S seconds while workers of this agent's round still run on other nodes, which
        may need this agent's stores, else up to LINGER_S seconds. If an exception is being handled, do
        nothing: the job may go on without this agent. Returns True.
        """
        if sys.exc_info()[0] is None:
            atexit.unregister(self._leave)  # the entry stays for agents that are frozen or cut off
            self._node.end(FINISHED, EXIT_S)
            began = time.monotonic()
            while time.monotonic() < began + self._time_to_stay():
                time.sleep(POLL_S)
        return True

    def _time_to_stay(self) -> float:
        """Return how many seconds after the job's end this agent should stay for the other agents."""
        view = self._node.view()
        others = [entry for entry in view.alive if entry.id != self._node.id]
        is_running = any(entry.state == RUNNING and entry.round == view.me.round for entry in others)
        if is_running:
            return FINISH_S
        return LINGER_S if others else 0.0

    def _leave(self) -> None:
        self._node.end(LEFT, EXIT_S)
        time.sleep(NOTICE_S)


def local_workers(params: RendezvousParameters) -> int:
    """Return the number of workers on this node, from --rdzv_conf=nproc=N or torchrun's --nproc_per_node=N.

    Raises ValueError if N is missing outside of torchrun, or is unusable, such as gpu on a host without one.
    """
    # Imported here: torch's launcher imports this file, a plugin, while the launcher is being imported.
    from torch.distributed.run import determine_local_world_size, parse_args

    nproc = params.get("nproc")
    if not nproc:
        is_torchrun = os.path.basename(sys.argv[0]) in ("torchrun", "run.py")
        if not is_torchrun:
            raise ValueError(
                "without torchrun, the rendezvous needs the number of workers: nproc=N in rdzv_conf"
            )
        nproc = parse_args(sys.argv[1:]).nproc_per_node
    return int(determine_local_world_size(nproc))


def own_port(endpoints: Sequence[Endpoint], address: str) -> int:
    """Return the port of the first endpoint whose host resolves to `address`, this node's; 0 if none does."""
    for host, port in endpoints:
        try:
            found = {info[4][0] for info in socket.getaddrinfo(host, port)}
        except (OSError, UnicodeError):
            continue  # the name may be that of a node that has not started
        if address in found:
            return port
    return 0
