"""Sentences from facts: each names the host, the cause and what to change; a healthy cluster gets none."""

from dataclasses import replace

from support.doctor import CLUSTER, CONFIG, MB

from mingpt.tools.doctor import Facts, find_faults


def only_fault(*workers: Facts) -> str:
    (fault,) = find_faults(workers)
    return fault


def test_a_healthy_cluster_has_no_fault() -> None:
    assert find_faults(CLUSTER) == []
    assert find_faults(CLUSTER[:1]) == []


def test_the_node_that_differs_from_most_is_named_with_both_values() -> None:
    *others, last = CLUSTER
    fault = only_fault(*others, replace(last, torch="2.11.0"))
    assert fault.startswith("node3 has torch 2.11.0 and the others 2.13.0") and "torch==2.13.0" in fault
    fault = only_fault(*others, replace(last, threads=8))
    assert "node3 computes with 8 CPU threads" in fault and "OMP_NUM_THREADS=1" in fault
    fault = only_fault(*others, replace(last, data="cd" * 32))
    assert "another text on node3 (sha256 cdcdcdcdcdcd)" in fault and "play.txt" in fault
    assert "the first node that can read it reads it for all" in fault
    fault = only_fault(replace(CLUSTER[0], device_type="cuda"), *CLUSTER[1:])
    assert fault.startswith("node1 computes on cuda and the others on cpu")


def test_of_two_nodes_that_differ_the_one_without_rank_0_is_named() -> None:
    first, second, _ = CLUSTER
    assert only_fault(first, replace(second, torch="2.11.0")).startswith("node2 has torch 2.11.0")
    assert "clock of node2 is 5.0 s behind" in only_fault(first, replace(second, clock_s=-5.0))


def test_settings_that_differ_are_listed() -> None:
    other = CONFIG | {"seed": 2, "optimizer.learning_rate": 0.1}
    fault = only_fault(*CLUSTER[:2], replace(CLUSTER[2], config=other))
    assert "node3 is started with optimizer.learning_rate=0.1, seed=2" in fault
    assert "the others with optimizer.learning_rate=0.007, seed=1" in fault


def test_a_node_with_two_workers_is_one_fault() -> None:
    pair = [
        replace(CLUSTER[2], rank=2, torch="2.11.0"),
        replace(CLUSTER[2], rank=3, local_rank=1, torch="2.11.0"),
    ]
    assert only_fault(*CLUSTER[:2], CLUSTER[0], replace(CLUSTER[1], rank=4), *pair).startswith(
        "node3 has torch"
    )


def test_nodes_with_the_same_host_name_are_told_by_their_number() -> None:
    one, other = replace(CLUSTER[0], host="vm"), replace(CLUSTER[1], host="vm", torch="2.11.0")
    assert only_fault(one, other).startswith("vm (node 1) has torch 2.11.0")


def test_a_clock_is_judged_by_most_clocks_and_not_by_that_of_rank_0() -> None:
    behind = [CLUSTER[0], *(replace(worker, clock_s=-5.0) for worker in CLUSTER[1:])]
    assert "the clock of node1 is 5.0 s ahead of the others'" in only_fault(*behind)
    assert find_faults([*CLUSTER[:2], replace(CLUSTER[2], clock_s=0.9)]) == []


def test_folders_that_cannot_be_written_are_named_with_the_reason_and_the_setting() -> None:
    folders: dict[str, str | None] = dict.fromkeys(CLUSTER[2].folders, "Read-only file system")
    fault = only_fault(*CLUSTER[:2], replace(CLUSTER[2], folders=folders))
    assert "run_dir out/a and the snapshot folder" in fault and "on node3 (Read-only file system)" in fault
    elsewhere = {"run_dir out/a": None, "snapshot.path /nfs/a": "Permission denied"}
    fault = only_fault(*CLUSTER[:2], replace(CLUSTER[2], folders=elsewhere))
    assert fault.startswith("snapshot.path /nfs/a cannot") and "another snapshot.path" in fault


def test_too_little_memory_is_told_with_what_is_needed() -> None:
    small = replace(CLUSTER[2], memory_free=19 * MB)
    fault = only_fault(*CLUSTER[:2], small)
    assert "/dev/shm on node3 has 19.0 MB free" in fault and "take 20.0 MB" in fault
    assert "snapshot.memory_path" in fault and "snapshot.memory_every=0" in fault
    absent = replace(CLUSTER[2], memory_free=None, memory_error="No such file or directory")
    assert "cannot be used on node3 (No such file or directory)" in only_fault(*CLUSTER[:2], absent)
    assert find_faults([*CLUSTER[:2], replace(small, memory_path=None, memory_free=None)]) == []
    poor = replace(CLUSTER[2], ram_free=29 * MB)  # two states in memory, one in the worker
    assert "node3 has 29.0 MB of memory free" in only_fault(*CLUSTER[:2], poor)
    assert find_faults([*CLUSTER[:2], replace(CLUSTER[2], ram_free=31 * MB)]) == []


def test_what_a_worker_could_not_do_is_a_fault_of_its_own() -> None:
    for change in (
        {"config_error": "unknown setting 'a.b'"},
        {"device_error": "trainer.device=cuda asks for GPU 0 and this machine has 0"},
        {"address_error": "GLOO_SOCKET_IFNAME=ib0 names no interface"},
        {"unfinished": "writing to run_dir out/a: not done after 20 s"},
        {"all_reduce_error": "timed out"},
    ):
        fault = only_fault(*CLUSTER[:2], replace(CLUSTER[2], **change))  # type: ignore[arg-type]
        (reason,) = change.values()
        assert "node3" in fault and reason in fault


def test_a_text_is_a_fault_only_if_no_node_can_read_it() -> None:
    error = "data.path play.txt does not exist"
    without = [replace(worker, data=None, data_error=error) for worker in CLUSTER]
    assert find_faults([*without[:2], CLUSTER[2]]) == []
    second = replace(CLUSTER[2], rank=3, local_rank=1, data=None)  # reads nothing itself
    assert only_fault(*without, second) == f"node1 and node2 and node3: {error}"
    forbidden = replace(without[2], data_error="data.path play.txt: Permission denied")
    assert find_faults([*without[:2], forbidden]) == [
        f"node1 and node2: {error}",
        "node3: data.path play.txt: Permission denied",
    ]
    assert only_fault(without[0]) == f"node1: {error}"


def test_a_worker_that_found_nothing_is_not_said_to_differ() -> None:
    silent = Facts(rank=2, node=2, host="node3", unfinished="it has stopped answering in this check-up")
    assert "stopped answering" in only_fault(*CLUSTER[:2], silent)
