import torch
from torch import nn

from mingpt.parallel.ddp import BUCKET_BYTES, allocate, make_buckets


def sizes_of(elements: list[int]) -> list[list[int]]:
    return make_buckets([nn.Parameter(torch.empty(size, device="meta")) for size in elements])


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    full = BUCKET_BYTES // 4
    buckets = sizes_of([3, full, 5, full // 2, full // 2, 7])
    assert [number for bucket in buckets for number in bucket] == [5, 4, 3, 2, 1, 0]
    assert buckets == [[5, 4, 3], [2, 1], [0]]


def test_what_has_memory_keeps_it() -> None:
    model = nn.Linear(3, 2)
    weight, value = model.weight, model.weight.detach().clone()
    allocate(model, torch.device("cpu"))
    assert model.weight is weight and torch.equal(weight, value)
