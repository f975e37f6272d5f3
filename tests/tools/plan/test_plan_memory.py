"""Memory, bytes sent and advice for known configurations."""

import dataclasses

import pytest

from mingpt.config.cli import parse
from mingpt.model import GPT
from mingpt.tools.plan.command import advise, strategies
from mingpt.tools.plan.costs import bytes_sent, estimate
from mingpt.tools.plan.workload import Workload

GPT2 = 124_439_808


def workload(*settings: str, workers: int = 4, on_cpu: bool = True, dtype: str = "float32") -> Workload:
    """GPT-2 of 124 M parameters, 16 micro-batches of one window."""
    given = ("model.arch=gpt2", "model.n_layer=12", "model.n_head=12", "model.n_embd=768")
    more = ("data.block_size=1024", "trainer.batch_size=16", "trainer.micro_batch_size=1")
    plain = ("optimizer.name=adamw", "snapshot.memory_every=0")
    words = {word.partition("=")[0]: word for word in (*given, *more, *plain, *settings)}
    return Workload(parse([*words.values()]), 50257, workers, on_cpu, dtype)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_parameters_are_those_of_the_model(arch: str) -> None:
    work = workload(f"model.arch={arch}", "model.n_layer=2", "model.n_embd=24", "data.block_size=16")
    model = GPT(work.config.model, vocab_size=50257, block_size=16)
    assert work.parameters == sum(weight.numel() for weight in model.parameters())


def test_what_is_sharded_is_held_once_by_all_workers_together() -> None:
    held = {label: estimate(one).held for label, one in strategies(workload())}
    ddp, sharded, fsdp, *_ = held.values()
    assert ddp["weights"] == sharded["weights"] == 4 * GPT2
    assert fsdp["weights"] == pytest.approx(GPT2, rel=0.01)
    assert ddp["optimizer"] == pytest.approx(8 * GPT2, rel=1e-3)
    assert sharded["optimizer"] == fsdp["optimizer"] == pytest.approx(2 * GPT2, rel=0.01)
    assert ddp["snapshots"] == pytest.approx(12 * GPT2, rel=1e-3)
    assert fsdp["snapshots"] == pytest.approx(3 * GPT2, rel=0.01)


def test_snapshots_in_memory_are_two_more_copies_on_a_cpu_and_none_of_it_is_a_gpus() -> None:
    with_them = workload("snapshot.memory_every=5")
    assert estimate(with_them).held["snapshots"] == 3 * estimate(workload()).held["snapshots"]
    assert estimate(dataclasses.replace(with_them, on_cpu=False)).held["snapshots"] == 0


@pytest.mark.parametrize(("workers", "most"), [(1, 4), (2, 3), (4, 2), (7, 2), (16, 0)])
def test_partial_sums_are_kept_like_a_binary_counter(workers: int, most: int) -> None:
    """Sixteen micro-batches; of seven workers it is not one with three micro-batches that keeps most."""
    assert workload(workers=workers).partial_sums() == most
    assert workload("trainer.reduction=fast", workers=workers).partial_sums() == 0


def test_bytes_sent_are_those_of_a_ring_and_of_gathering_in_each_round() -> None:
    others = 3 / 4
    assert bytes_sent(workload("trainer.reduction=fast")) == pytest.approx(2 * 4 * GPT2 * others)
    assert bytes_sent(workload()) == pytest.approx(2 * 4 * GPT2 * others)  # whole subtrees of 4 of 16
    assert bytes_sent(workload(workers=3)) > bytes_sent(workload("trainer.reduction=fast", workers=3))
    blocks = 12 * 7_087_872
    fsdp = workload("trainer.parallel=fsdp")
    assert bytes_sent(fsdp) == pytest.approx(4 * 4 * (2 * GPT2 + blocks) * others)
    kept = workload("trainer.parallel=fsdp", "trainer.fsdp_reshard=false")
    assert bytes_sent(kept) == pytest.approx(4 * 4 * 2 * GPT2 * others)
    halves = workload("trainer.parallel=fsdp", "trainer.fsdp_param_dtype=bfloat16")
    assert bytes_sent(halves) == pytest.approx(4 * (2 * (GPT2 + blocks) + 4 * GPT2) * others)
    assert bytes_sent(workload(workers=1)) == 0


def test_rows_of_muons_matrices_go_to_one_worker_and_back_where_whole_ones_go_to_all() -> None:
    others, matrices = 3 / 4, 12 * 12 * 768**2
    whole = bytes_sent(workload("optimizer.name=muon")) - bytes_sent(workload())
    assert whole == pytest.approx(2 * matrices * others)
    fsdp = ["trainer.parallel=fsdp"]
    rows = bytes_sent(workload(*fsdp, "optimizer.name=muon")) - bytes_sent(workload(*fsdp))
    assert rows == pytest.approx(2 * 2 * matrices / 4 * others)


def test_the_first_strategy_that_fits_is_named_and_where_none_does_what_to_change() -> None:
    work = workload("trainer.micro_batch_size=16", "trainer.batch_size=64")
    peaks = [estimate(one).peak_bytes for _, one in strategies(work)]
    assert advise(work, peaks[0]) == "trainer.parallel=ddp fits"
    assert advise(work, peaks[0] - 1) == "trainer.parallel=ddp trainer.shard_optimizer=true fits"
    assert advise(work, peaks[2] - 1) == "trainer.parallel=fsdp trainer.recompute=block fits"
    smallest = strategies(work)[-1][1]
    smaller = estimate(smallest.with_trainer(micro_batch_size=8)).peak_bytes
    assert advise(work, smaller) == (
        "no strategy fits; trainer.parallel=fsdp trainer.recompute=block does with trainer.micro_batch_size=8"
    )
    assert advise(work, 10**6).startswith("no strategy fits: try more workers")
