from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards import write_llmc

from mingpt.base.errors import UserError
from mingpt.data import CharDataset, open_shards
from mingpt.data.windows import PREFETCH_BATCHES


def test_a_window_is_an_input_and_its_targets_one_to_the_right() -> None:
    dataset = CharDataset(np.arange(50, dtype=np.uint8), 8)
    inputs, targets = dataset.__getitems__([0, 41])
    assert inputs.tolist() == [list(range(8)), list(range(41, 49))]
    assert targets.tolist() == [list(range(1, 9)), list(range(42, 50))]
    assert torch.equal(dataset[41][1], targets[1])
    assert len(dataset) == 42


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 50])
def test_validation_predicts_every_token_but_the_first_exactly_once(length: int) -> None:
    dataset = CharDataset(np.arange(length, dtype=np.uint8), 8)
    batches = [dataset.read(*batch) for batch in dataset.eval_batches(3)]
    predicted = [token for windows in batches for token in windows[:, 1:].flatten().tolist()]
    assert predicted == list(range(1, length))
    assert all(1 <= len(windows) <= 3 and windows.size(1) <= 9 for windows in batches)


@pytest.mark.parametrize("length", [9, 17, 18, 50, 333])
@pytest.mark.parametrize("max_windows", [1, 2, 5, 7])
def test_a_subset_of_windows_is_evenly_spaced_and_does_not_depend_on_the_batch_size(
    length: int, max_windows: int
) -> None:
    dataset = CharDataset(np.arange(length, dtype=np.uint16), 8)
    few, same = (
        [
            row[:-1]
            for batch in dataset.eval_batches(size, max_windows)
            for row in dataset.read(*batch).tolist()
        ]
        for size in (2, 3)
    )
    assert few == same
    starts = [row[0] for row in few]
    whole, rest = divmod(length - 1, 8)
    if max_windows >= whole + (rest > 0):
        assert sum(map(len, few)) == length - 1
        return
    assert len(starts) == max_windows and all(len(row) == 8 and row[0] % 8 == 0 for row in few)
    distances = np.diff([*starts, starts[0] + 8 * whole]) // 8
    assert distances.min() >= whole // max_windows and distances.max() <= whole // max_windows + 1


def test_batches_are_the_windows_in_the_order_asked_for() -> None:
    """There are more batches than are gathered at once, and the last one is smaller."""
    dataset = CharDataset(np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint8), 8)
    starts = [start * 7 % 990 for start in range(3 * PREFETCH_BATCHES + 1)]
    batches = list(dataset.batches(starts, 3))
    assert [len(batch[0]) for batch in batches] == [3] * PREFETCH_BATCHES + [1]
    expected_inputs, expected_targets = dataset.__getitems__(starts)
    assert torch.equal(torch.cat([batch[0] for batch in batches]), expected_inputs)
    assert torch.equal(torch.cat([batch[1] for batch in batches]), expected_targets)


def test_batches_before_one_that_cannot_be_used_come_first(tmp_path: Path) -> None:
    tokens = np.arange(400) % 50
    tokens[205] = 50
    write_llmc(tmp_path / "train_0.bin", tokens)
    write_llmc(tmp_path / "val_0.bin", tokens)
    shards = open_shards(tmp_path, 0.5).train
    dataset = CharDataset(shards, 8, vocab_size=50)
    batches = dataset.batches(range(0, 390, 8), 4)
    found: list[tuple[torch.Tensor, ...]] = []
    with pytest.raises(
        UserError, match=r"token 205 of .*train_0.bin is 50, and the vocabulary has 50 tokens"
    ):
        found.extend(batches)
    assert [batch[0][0, 0].item() for batch in found] == [start % 50 for start in range(0, 192, 32)]
