"""Sentences from facts: each names the node, the cause and what to do; a healthy cluster gets none."""

from typing import Any

import pytest
from torch.distributed import HashStore

from mingpt.base.errors import PeersMissing
from mingpt.distributed import Launch
from mingpt.tools import doctor
from mingpt.tools.doctor import Facts, all_gather, report


def cluster(*changes: dict[str, Any]) -> list[Facts]:
    plain: dict[str, Any] = {"host": "eth0", "device": "cpu AVX512", "program": "torch 2.13", "threads": 1}
    plain |= {"kernels": "none", "Python": "3.12", "problem": None, "MB/s": 90.0}
    facts = [plain | {"name": f"node{n}"} for n in (1, 2, 3)]
    for there, change in zip(reversed(facts), reversed(changes), strict=False):
        there.update(change)
    return facts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [{"program": "torch 2.11"}],
            "program differs, node1, node2: torch 2.13; node3: torch 2.11: install",
        ),
        ([{"threads": 8}, {}], "threads differs, node1, node3: 1; node2: 8: set OMP_NUM_THREADS"),
        ([{"kernels": "MKL_CBWR=AVX2"}], "kernels differs, node1, node2: none; node3: MKL_CBWR=AVX2: set"),
        ([{"device": "", "problem": "asks for GPU 1"}], "node3: asks for GPU 1"),
        ([{"MB/s": 9.0}], "node3 receives 9.0 MB/s from node2, less than a quarter of what is usual"),
        ([{"MB/s": 9.0}, {}, {"MB/s": 9.0}], "node1 receives 9.0 MB/s from node3, less than a quarter"),
    ],
)
def test_a_fault_is_one_sentence_that_names_the_node(changes: list[dict[str, Any]], said: str) -> None:
    assert report(cluster(*changes))[1][0].startswith(f"fault:   {said}")


def test_a_healthy_cluster_has_no_fault_and_a_line_per_fact() -> None:
    rows, faults = report(cluster({"Python": "3.13", "host": "eth1", "MB/s": 30.0}))
    assert faults == [] and rows[-1] == "MB/s     node3: 30.0"
    assert rows[:2] == ["host     node1, node2: eth0", "host     node3: eth1"]


def test_a_worker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 0.1)
    with pytest.raises(PeersMissing, match="workers 1, 2 did not answer within"):
        all_gather(HashStore(), Launch(world_size=3), "facts", {})
