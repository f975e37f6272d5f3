"""The keys of a round: shared by its agents, and never waited for once a member is lost."""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.utils.store import barrier

from mingpt.launch.elastic import handler as module
from mingpt.launch.elastic.boards import Message, Server
from mingpt.launch.elastic.handler import KeyMemory, RoundStore, assigned_ranks

HERE = "127.0.0.1"


def serve(operations: dict[str, Callable[[Message], Message]]) -> int:
    server = Server(HERE, 0, operations)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.port


def stores(count: int, is_over: Callable[[], bool] = lambda: False) -> list[RoundStore]:
    port = serve(KeyMemory().operations())
    return [RoundStore(HERE, port, "round", is_over) for _ in range(count)]


def test_what_one_agent_sets_another_gets() -> None:
    one, other = stores(2)
    one.set("key", b"\x00\xff")
    one.multi_set(["a", "b"], ["1", b"2"])
    assert other.get("key") == b"\x00\xff"
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    assert [one.add("n", 1), other.add("n", 2)] == [1, 3]
    other.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(DistStoreError, match="in time"):
        other.get("nothing")


def test_rounds_do_not_see_each_others_keys() -> None:
    port = serve(KeyMemory().operations())
    first, second = (RoundStore(HERE, port, name, lambda: False) for name in ("first", "second"))
    first.set("key", "1")
    second.set_timeout(timedelta(0))
    with pytest.raises(DistStoreError, match="nobody has set key"):
        second.get("key")


def test_torchruns_barrier_holds_until_all_have_come() -> None:
    one, other = stores(2)
    passed: list[str] = []

    def come(store: RoundStore, name: str) -> None:
        barrier(store, world_size=2, key_prefix="end", barrier_timeout=20)
        passed.append(name)

    early = threading.Thread(target=come, args=(one, "one"))
    early.start()
    early.join(0.3)
    assert passed == []
    come(other, "other")
    early.join(10)
    assert sorted(passed) == ["one", "other"]


def test_a_barrier_ends_once_a_member_is_lost() -> None:
    lost = threading.Event()
    (one,) = stores(1, lost.is_set)
    waiting = threading.Thread(target=barrier, args=(one, 2, "end"))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    lost.set()
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(DistStoreError, match="a node was lost"):
        one.get("what the lost node would have set")


def test_nothing_waits_for_a_leader_that_is_gone() -> None:
    with socket.socket() as bound:
        bound.bind((HERE, 0))  # without listening: it refuses
        gone = RoundStore(HERE, bound.getsockname()[1], "round", lambda: True)
        began = time.monotonic()
        barrier(gone, 2, "end")
    assert time.monotonic() - began < 2


def test_an_addition_whose_answer_was_lost_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KeyMemory()
    failed: list[bool] = []

    def add(message: Message) -> Message:
        answer = memory.operations()["add"](message)
        if not failed:
            failed.append(True)
            time.sleep(0.5)  # longer than who asks is willing to wait
        return answer

    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.2)
    store = RoundStore(HERE, serve(memory.operations() | {"add": add}), "round", lambda: False)
    assert store.add("n", 1) == 1 and failed
    assert store.add("n", 1) == 2


def test_torchrun_ranks_the_workers_of_unequal_nodes_without_asking_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_WORKER_IDENTICAL", raising=False)
    counts = (2, 1, 3)
    ranks = []
    with socket.socket() as bound:
        bound.bind((HERE, 0))  # the leader has died: it refuses
        port = bound.getsockname()[1]
        for group_rank, count in enumerate(counts):
            store = RoundStore(HERE, port, "round", lambda: True, assigned_ranks(counts))
            spec: Any = SimpleNamespace(role="default", local_world_size=count)
            assign: Any = vars(SimpleElasticAgent)["_assign_worker_ranks"]
            workers = assign(None, store, group_rank, len(counts), spec)
            ranks += [worker.global_rank for worker in workers]
            assert {worker.world_size for worker in workers} == {6}
            assert [worker.role_rank for worker in workers] == [worker.global_rank for worker in workers]
            assert {worker.role_world_size for worker in workers} == {6}
    assert ranks == list(range(6))


def test_without_all_counts_of_workers_ranks_are_shared_by_the_agents() -> None:
    assert assigned_ranks([2, 0]) == {}
