import pytest
import torch

from mingpt.optim import Exchange, chunk_rows


@pytest.mark.parametrize("workers", range(1, 9))
def test_the_rows_of_the_workers_are_those_of_torch_chunk(workers: int) -> None:
    for count in range(1, 40):
        rows = chunk_rows(count, workers)
        assert len(rows) == workers
        assert [row for part in rows for row in part] == list(range(count))
        theirs = [len(chunk) for chunk in torch.arange(count).chunk(workers)]
        assert [len(part) for part in rows] == theirs + [0] * (workers - len(theirs))


def test_a_single_worker_exchanges_with_itself() -> None:
    alone = Exchange()
    tensor = torch.arange(3.0)
    assert torch.equal(alone.all_to_all(tensor, [3], [3]), tensor)
    alone.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(3.0))
    assert list(alone.rows(5)) == [range(5)]
    assert (alone.rank, alone.workers, alone.is_sharded) == (0, 1, False)
