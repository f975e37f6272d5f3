from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(9, 400), st.none() | st.integers(1, 60), st.integers(1, 5))
def test_validation_predicts_each_token_but_the_first_once_or_takes_evenly_spaced_windows(
    length: int, max_windows: int | None, batch_size: int
) -> None:
    """Whatever the size of the batches."""
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


def test_batches_before_one_that_cannot_be_used_come_first(tmp_path: Path) -> None:
    tokens = np.arange(400) % 50
    tokens[205] = 50
    write_llmc(tmp_path / "train_0.bin", tokens)
    write_llmc(tmp_path / "val_0.bin", tokens)
    dataset, first = CharDataset(open_shards(tmp_path, 0.5).train, 8, vocab_size=50), list[int]()
    with pytest.raises(
        UserError, match=r"token 205 of .*train_0.bin is 50, and the vocabulary has 50 tokens"
    ):
        for inputs, *_ in dataset.batches(range(0, 390, 8), 4):
            first.append(int(inputs[0, 0]))
    assert first == [start % 50 for start in range(0, 192, 32)]
