import torch
from torch import nn

from mingpt.parallel.ddp import BUCKET_BYTES, make_buckets
from mingpt.parallel.strategy import allocate


def names_of(elements: list[int]) -> list[list[str]]:
    return make_buckets(
        {str(number): torch.empty(size, device="meta") for number, size in enumerate(elements)}
    )


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    full = BUCKET_BYTES // 4
    assert names_of([3, full, 5, full // 2, full // 2, 7]) == [["5", "4", "3"], ["2", "1"], ["0"]]


def test_what_has_memory_keeps_it() -> None:
    model = nn.Linear(3, 2)
    weight, value = model.weight, model.weight.detach().clone()
    allocate(model, torch.device("cpu"))
    assert model.weight is weight and torch.equal(weight, value)
