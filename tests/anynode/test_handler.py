"""How an agent in this process proposes a round to a peer that a test plays."""

import atexit
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.jobs import wait_until
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.utils.store import barrier

from anynode.boards import FolderBoard, Message, Server, request
from anynode.decisions import RUNNING, WAITING, Entry
from anynode.handler import AnyNodeRendezvous, RoundStore, assigned_ranks, local_workers
from anynode.node import Node

HERE, PEER = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def new_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AnyNodeRendezvous]:
    monkeypatch.setattr(atexit, "register", lambda *arguments: None)
    for name in ("ANYNODE_JOB", "ANYNODE_ROUND", "ANYNODE_STORE_PORT"):
        monkeypatch.setenv(name, "")

    def make(endpoint: str = f"{tmp_path}/meet") -> AnyNodeRendezvous:
        return AnyNodeRendezvous(RendezvousParameters("anynode", endpoint, "job", 2, 2, HERE, nproc="1"))

    return make


class Peer:
    """An agent that answers proposals as `accepts` tells, and counts them."""

    def __init__(self, folder: Path, accepts: Callable[[], bool]) -> None:
        self.node, self.proposals = Node("peer", PEER, 1), 0
        operations: Any = self.node.operations()

        def propose(message: Message) -> Message:
            self.proposals += 1
            return operations["propose"](message) if accepts() else {"ok": False}

        server = Server(PEER, 0, operations | {"propose": propose})
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.node.start(server.port, [FolderBoard(folder, "job")])


def test_a_proposal_that_is_refused_is_tried_again_at_leisure_and_said_once(
    new_handler: Callable[..., AnyNodeRendezvous], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepts = threading.Event()
    handler, peer = new_handler(), Peer(tmp_path / "meet", accepts.is_set)
    thread = threading.Thread(target=handler.next_rendezvous, daemon=True)
    thread.start()
    wait_until(lambda: peer.proposals > 0)
    before = peer.proposals
    time.sleep(1.5)  # meanwhile the agent proposes again
    assert 3 <= peer.proposals - before <= 15
    accepts.set()
    thread.join(10)
    assert not thread.is_alive() and peer.node.entered is not None
    assert capsys.readouterr().err.count("peer (127.0.0.2) did not accept the round; retrying") == 1


def test_an_agent_whose_port_is_taken_hosts_its_board_once_it_is_free(
    new_handler: Callable[..., AnyNodeRendezvous], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        new_handler(f"{HERE}:{port}")
        said = capsys.readouterr().err
        assert f"port {port} is taken" in said and "this node cannot host the rendezvous for now" in said

    def answers() -> bool:
        try:
            return "id" in request(HERE, port, {"op": "ping"}, 1)
        except OSError:
            return False

    wait_until(answers)


def test_an_agent_whose_workers_have_finished_waits_for_no_other_agent() -> None:
    barrier(RoundStore({}), 2, "end", barrier_timeout=0.2)


def test_torchrun_ranks_the_workers_of_unequal_nodes_without_asking_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_WORKER_IDENTICAL", raising=False)
    counts = (2, 1, 3)
    store = RoundStore(assigned_ranks(counts))
    ranks = []
    for group_rank, count in enumerate(counts):
        spec: Any = SimpleNamespace(role="default", local_world_size=count)
        assign: Any = vars(SimpleElasticAgent)["_assign_worker_ranks"]
        workers = assign(None, store, group_rank, len(counts), spec)
        ranks += [worker.global_rank for worker in workers]
        assert {worker.world_size for worker in workers} == {6}
        assert [worker.role_rank for worker in workers] == [worker.global_rank for worker in workers]
        assert {worker.role_world_size for worker in workers} == {6}
    assert ranks == list(range(6))


def test_each_round_has_a_new_store_and_the_job_keeps_one(
    new_handler: Callable[..., AnyNodeRendezvous], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that dead workers left in a round's store would mislead their successors."""
    handler, peer = new_handler(), Peer(tmp_path / "meet", lambda: True)
    ports = []
    for number in (1, 2):
        peer.node.wait_for_round()
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, os.environ["ANYNODE_ROUND"]) == (0, 2, str(number))
        assert info.bootstrap_store_info
        of_round, of_job = info.bootstrap_store_info.master_port, int(os.environ["ANYNODE_STORE_PORT"])
        stores = [TCPStore(HERE, port, is_master=False) for port in (of_round, of_job)]
        assert [store.check(["from the first round"]) for store in stores] == [False, number == 2]
        for store in stores:
            store.set("from the first round", "")
        ports.append((of_round, of_job))
    assert ports[0][0] != ports[1][0] and ports[0][1] == ports[1][1]


@pytest.mark.parametrize(
    ("state", "stays_s"), [(RUNNING, 300.0), (WAITING, 2.0), (None, 0.0)], ids=["runs", "waits", "alone"]
)
def test_an_agent_stays_for_workers_of_its_round_that_still_run(
    state: str | None,
    stays_s: float,
    new_handler: Callable[..., AnyNodeRendezvous],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = Entry("me", "host", HERE, 1, round="r")
    other = dataclasses.replace(me, id="other", state=state or "")
    handler = new_handler()
    monkeypatch.setattr(vars(handler)["_node"], "id", "me")
    view = SimpleNamespace(me=me, alive=(me, other) if state else (me,))
    monkeypatch.setattr(Node, "view", lambda self: view)
    assert vars(AnyNodeRendezvous)["_time_to_stay"](handler) == stays_s


def test_the_number_of_workers_comes_from_torchrun_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = RendezvousParameters("anynode", f"{tmp_path}/meet", "job", 1, 1, HERE)
    monkeypatch.setattr(
        "sys.argv", ["/usr/bin/torchrun", "--nproc_per_node=3", "script.py", "--nproc_per_node=4"]
    )
    assert local_workers(params) == 3
    assert local_workers(RendezvousParameters("anynode", "a:1", "job", 1, 1, HERE, nproc="2")) == 2
    monkeypatch.setattr("sys.argv", ["my_launcher.py"])
    with pytest.raises(ValueError, match="needs the number of workers"):
        local_workers(params)
