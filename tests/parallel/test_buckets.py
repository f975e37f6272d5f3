import torch
from torch import nn

from mingpt.config import ModelConfig
from mingpt.model import GPT
from mingpt.model.layers import Linear
from mingpt.parallel.ddp import BUCKET_BYTES, allocate, make_buckets


def sizes_of(elements: list[int]) -> list[list[int]]:
    return make_buckets([nn.Parameter(torch.empty(size, device="meta")) for size in elements])


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    full = BUCKET_BYTES // 4
    buckets = sizes_of([3, full, 5, full // 2, full // 2, 7])
    assert [number for bucket in buckets for number in bucket] == [5, 4, 3, 2, 1, 0]
    assert buckets == [[5, 4, 3], [2, 1], [0]]


def test_what_is_on_the_meta_device_gets_memory_and_what_is_shared_stays_so() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=1, n_embd=8), vocab_size=5, block_size=4)
        model.lm_head = Linear(8, 5, bias=False)
    assert model.lm_head is not None
    model.lm_head.weight = model.wte.weight
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    allocate(model, torch.device("cpu"))
    assert model.lm_head.weight is model.wte.weight
    assert {name: weight.shape for name, weight in model.named_parameters()} == shapes
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"} and not any(t.is_meta for t in tensors)
    assert all(weight.requires_grad for weight in model.parameters())
    model.init_buffers()
    model.init_weights(1)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long))[0]).all()


def test_what_has_memory_keeps_it() -> None:
    model = nn.Linear(3, 2)
    weight, value = model.weight, model.weight.detach().clone()
    allocate(model, torch.device("cpu"))
    assert model.weight is weight and torch.equal(weight, value)
