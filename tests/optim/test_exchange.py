import torch

from mingpt.optim import Exchange


def test_a_single_worker_exchanges_with_itself() -> None:
    alone = Exchange()
    tensor = torch.arange(3.0)
    assert torch.equal(alone.all_to_all(tensor, [3], [3]), tensor)
    (gathered,) = alone.all_gather(tensor, [3])
    assert gathered is tensor
    assert list(alone.rows(5)) == [range(5)]
    assert (alone.rank, alone.workers, alone.is_sharded) == (0, 1, False)
