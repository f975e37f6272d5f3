"""What torchrun gets from an agent: ranks, stores, and the time to stay."""

import atexit
import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.utils.store import barrier

from anynode.boards import FolderBoard, Server
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


def start_peer(folder: Path) -> Node:
    """Start an agent that accepts all proposals."""
    node = Node("peer", PEER, 1)
    server = Server(PEER, 0, node.operations())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node.start(server.port, [FolderBoard(folder, "job")])
    return node


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
    handler, peer = new_handler(), start_peer(tmp_path / "meet")
    ports = []
    for number in (1, 2):
        peer.wait_for_round()
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


def test_the_number_of_workers_comes_from_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = RendezvousParameters("anynode", f"{tmp_path}/meet", "job", 1, 1, HERE)
    words = ["/usr/bin/torchrun", "--nproc_per_node=3", "script.py", "--nproc_per_node=4"]
    monkeypatch.setattr("sys.argv", words)
    assert local_workers(params) == 3
