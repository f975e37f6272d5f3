import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from mingpt.data import CharDataset, ElasticSampler, mix
from mingpt.data.windows import permute

DATASET = CharDataset(np.zeros(1000, dtype=np.uint8), 8)  # 124 windows an epoch, offsets 0..7


def sampler(
    rank: int = 0,
    workers: int = 1,
    seed: int = 3,
    batch_size: int = 12,
    micro: int = 2,
    takes_turns: bool = False,
) -> ElasticSampler:
    return ElasticSampler(
        DATASET,
        batch_size=batch_size,
        micro_batch_size=micro,
        seed=seed,
        num_replicas=workers,
        rank=rank,
        takes_turns=takes_turns,
    )


def steps(workers: int, count: int, windows_seen: int = 0, takes_turns: bool = False) -> list[list[int]]:
    """The windows that all workers together read in each step, in the order of the micro-batches."""
    read: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for rank in range(workers):
        one = sampler(rank, workers, takes_turns=takes_turns)
        one.seek(windows_seen)
        windows = iter(one)
        for step in read:
            for number in one.my_micro_batches():
                assert number not in step
                step[number] = [next(windows) for _ in range(one.micro_batch_size)]
    return [[start for number in sorted(step) for start in step[number]] for step in read]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_meets_every_place_once(size: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, 5).tolist()) == list(range(size))


def test_the_order_is_the_one_it_has_always_been() -> None:
    """These are golden values: after a change here, every resumed run would read other windows."""
    permuted = permute(np.arange(8, dtype=np.uint64), 100, mix(1, 2, 3))
    assert permuted.tolist() == [1, 83, 38, 94, 49, 93, 12, 27]
    assert mix(1, 2, 3) == 7702586659592502839


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7])
def test_each_window_of_an_epoch_is_read_once_by_any_number_of_workers(
    workers: int, takes_turns: bool
) -> None:
    """3 epochs of 124 windows take 31 steps of 12; the micro-batches do not depend on who reads them."""
    read = [start for step in steps(workers, 31, takes_turns=takes_turns) for start in step]
    for epoch in range(3):
        windows = sorted(read[epoch * 124 : (epoch + 1) * 124])
        assert windows == list(range(windows[0], 1000 - 8, 8))
        assert windows[0] in range(8)
    assert steps(workers, 31, takes_turns=takes_turns) == steps(1, 31)


def test_epochs_differ_in_order_and_offset_and_so_do_seeds() -> None:
    orders = [sampler(seed=seed).window_starts(epoch * 124, 124) for seed in (1, 2) for epoch in range(50)]
    assert len({tuple(order) for order in orders}) == 100
    assert {int(order.min()) for order in orders} == set(range(8))


@pytest.mark.parametrize("windows_seen", [0, 12, 120, 124 * 12])
def test_seeking_goes_on_where_another_number_of_workers_stopped(windows_seen: int) -> None:
    first_step = windows_seen // 12
    assert steps(3, 5, windows_seen) == steps(1, first_step + 5)[first_step:]


@pytest.mark.parametrize("workers", range(1, 12))
def test_a_workers_micro_batches_are_neighbours_or_one_of_each_round(workers: int) -> None:
    """The tree of parallel/tree.py relies on the first, the sum of parallel/fsdp.py on the second."""
    for takes_turns in (False, True):
        samplers = [sampler(rank, workers, batch_size=16, takes_turns=takes_turns) for rank in range(workers)]
        parts = [one.my_micro_batches() for one in samplers]
        assert samplers[0].micro_batches_by_rank() == parts
        rounds = [range(rank, 8, workers) for rank in range(workers)]
        neighbours = list(itertools.chain(*parts)) == list(range(8))
        assert parts == rounds if takes_turns else neighbours


def test_samples_of_any_data_set_are_each_read_once_in_an_epoch() -> None:
    one = ElasticSampler(TensorDataset(torch.arange(10)), batch_size=4, micro_batch_size=1, seed=3)
    read = list(itertools.islice(one, 20))
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10)) and read[:10] != read[10:]


@pytest.mark.parametrize(("count", "batch_size"), [(10, 5), (0, 4)])
def test_a_step_needs_samples_and_whole_micro_batches(count: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="do not make micro-batches of 2"):
        ElasticSampler(TensorDataset(torch.zeros(count)), batch_size=batch_size, micro_batch_size=2, seed=1)
