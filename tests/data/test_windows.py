"""Windows of tokens, and their order, which depends on the seed alone: not on who reads them."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from torch.utils.data import TensorDataset

from mingpt.data import CharDataset, ElasticSampler, mix
from mingpt.data.windows import PREFETCH_BATCHES, PREFETCH_STEPS, permute

DATASET = CharDataset(np.zeros(1000, dtype=np.uint8), 8)  # 124 windows an epoch, offsets 0..7
BATCH, EPOCH = 12, 124


def sampler(rank: int = 0, workers: int = 1, takes_turns: bool = False, seed: int = 3) -> ElasticSampler:
    options = {"batch_size": BATCH, "micro_batch_size": 2, "num_replicas": workers, "rank": rank}
    return ElasticSampler(DATASET, seed=seed, takes_turns=takes_turns, **options)


ORDER = np.concatenate([sampler().window_starts(epoch * EPOCH, EPOCH) for epoch in range(12)])


@examples(50)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_meets_every_place_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


def test_the_order_is_the_one_it_has_always_been() -> None:
    """These are golden values: after a change here, every resumed run would read other windows."""
    permuted = permute(np.arange(8, dtype=np.uint64), 100, mix(1, 2, 3))
    assert permuted.tolist() == [1, 83, 38, 94, 49, 93, 12, 27]
    assert mix(1, 2, 3) == 7702586659592502839


def test_each_window_of_an_epoch_is_read_once_and_epochs_and_seeds_differ() -> None:
    orders = [
        sampler(seed=seed).window_starts(epoch * EPOCH, EPOCH) for seed in (1, 2) for epoch in range(50)
    ]
    for order in orders:
        assert sorted(order) == list(range(order.min(), 1000 - 8, 8))
    assert len({tuple(order) for order in orders}) == 100
    assert {int(order.min()) for order in orders} == set(range(8))


@examples(30)
@given(st.integers(1, 13), st.booleans(), st.integers(0, 80), st.sampled_from([1, 5, PREFETCH_STEPS + 2]))
def test_from_any_step_on_any_number_of_workers_reads_the_windows_of_one(
    workers: int, takes_turns: bool, first: int, count: int
) -> None:
    """Together they read each micro-batch of each step once, also across epochs."""
    read = np.full((count, BATCH // 2, 2), -1)
    for rank in range(workers):
        one = sampler(rank, workers, takes_turns)
        one.seek(first * BATCH)
        windows = iter(one)
        for step, number in itertools.product(range(count), one.my_micro_batches()):
            assert read[step, number, 0] == -1
            read[step, number] = next(windows), next(windows)
    assert read.ravel().tolist() == ORDER[first * BATCH : (first + count) * BATCH].tolist()


def test_samples_of_any_data_set_are_each_read_once_in_an_epoch() -> None:
    one = ElasticSampler(TensorDataset(torch.arange(10)), batch_size=4, micro_batch_size=1, seed=3)
    read = list(itertools.islice(one, 20))
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10)) and read[:10] != read[10:]


def test_a_window_is_an_input_and_its_targets_one_to_the_right() -> None:
    dataset = CharDataset(np.arange(50, dtype=np.uint8), 8)
    inputs, targets = dataset.__getitems__([0, 41])
    assert inputs.tolist() == [list(range(8)), list(range(41, 49))]
    assert targets.tolist() == [list(range(1, 9)), list(range(42, 50))]
    assert torch.equal(dataset[41][1], targets[1])
    assert len(dataset) == 42


@examples(100)
@given(st.integers(9, 400), st.none() | st.integers(1, 60), st.integers(1, 5))
def test_validation_predicts_each_token_but_the_first_once_or_takes_evenly_spaced_windows(
    length: int, max_windows: int | None, batch_size: int
) -> None:
    dataset = CharDataset(np.arange(length, dtype=np.uint16), 8)
    batches = [dataset.read(*batch) for batch in dataset.eval_batches(batch_size, max_windows)]
    assert all(1 <= len(windows) <= batch_size for windows in batches)
    rows = [row for windows in batches for row in windows.tolist()]
    assert rows == [dataset.read(*batch)[0].tolist() for batch in dataset.eval_batches(1, max_windows)]
    whole, rest = divmod(length - 1, 8)
    if max_windows is None or max_windows >= whole + (rest > 0):
        assert [token for row in rows for token in row[1:]] == list(range(1, length))
        return
    starts = [row[0] for row in rows]
    assert len(starts) == max_windows and all(len(row) == 9 and row[0] % 8 == 0 for row in rows)
    distances = np.diff([*starts, starts[0] + 8 * whole]) // 8
    assert whole // max_windows <= distances.min() and distances.max() <= whole // max_windows + 1


def test_batches_are_the_windows_in_the_order_asked_for() -> None:
    """There are more batches than are gathered at once, and the last one is smaller."""
    dataset = CharDataset(np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint8), 8)
    starts = [start * 7 % 990 for start in range(3 * PREFETCH_BATCHES + 1)]
    batches = list(dataset.batches(starts, 3))
    assert [len(batch[0]) for batch in batches] == [3] * PREFETCH_BATCHES + [1]
    for number, expected in enumerate(dataset.__getitems__(starts)):
        assert torch.equal(torch.cat([batch[number] for batch in batches]), expected)
