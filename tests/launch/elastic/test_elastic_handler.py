"""How an agent in this process proposes a round to a peer that a test plays."""

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.utils.store import barrier

from mingpt.base.errors import UserError
from mingpt.distributed.launch import MEMORY_FILE
from mingpt.launch.elastic.boards import FolderBoard, Message, Server, request
from mingpt.launch.elastic.handler import ElasticRendezvous, RoundStore, assigned_ranks
from mingpt.launch.elastic.node import Node
from mingpt.snapshot import MemorySnapshots
from mingpt.snapshot.memory import LEFT_TO_AGENT

HERE, PEER = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def new_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ElasticRendezvous]:
    monkeypatch.setattr(atexit, "register", lambda function: function)
    monkeypatch.setenv("MINGPT_JOB", "")
    monkeypatch.setenv("MINGPT_ROUND", "")

    def make(endpoint: str = f"{tmp_path}/meet") -> ElasticRendezvous:
        return ElasticRendezvous(RendezvousParameters("mingpt", endpoint, "job", 2, 2, HERE, nproc="1"))

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
    new_handler: Callable[..., ElasticRendezvous], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    new_handler: Callable[..., ElasticRendezvous], capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize("end", ["finished", "left", "failed"])
def test_an_agent_that_ends_frees_the_memory_of_its_node_unless_its_workers_failed(
    end: str, new_handler: Callable[..., ElasticRendezvous], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the job's end, or its workers left snapshots to a next generation. Others' stay."""
    monkeypatch.setattr(Node, "view", lambda self: SimpleNamespace(finished=True))
    own, other = [MemorySnapshots(str(tmp_path), run_id, tmp_path).root for run_id in ("own", "other")]
    handler = new_handler()
    Path(os.environ[MEMORY_FILE]).write_text(str(own))  # as a worker does
    for root in (own, other):
        root.mkdir(mode=0o700)
        (root / f"{32 * '0'}-0").mkdir()
    if end == "finished":
        with pytest.raises(SystemExit, match="0"):
            handler.next_rendezvous()
    else:
        if end == "left":
            (own / LEFT_TO_AGENT).touch()
        vars(ElasticRendezvous)["_leave"](handler)
    assert own.exists() == (end == "failed") and other.exists()


def test_torchrun_without_the_script_is_told_to_use_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start it by launch"):
        ElasticRendezvous(RendezvousParameters("mingpt", f"{tmp_path}/meet", "job", 1, 1, HERE))
