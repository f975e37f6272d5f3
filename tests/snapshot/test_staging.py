import torch
from safetensors.torch import load
from support.snapshots import TENSORS

from mingpt.snapshot import StagingBuffer, to_safetensors


def test_the_content_is_a_safetensors_file() -> None:
    tensors = load(bytes(to_safetensors(TENSORS)))
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype


def test_the_order_of_the_tensors_does_not_change_the_bytes() -> None:
    assert to_safetensors(dict(reversed(TENSORS.items()))) == to_safetensors(TENSORS)


def test_a_buffer_keeps_a_state_until_it_is_filled_with_the_next() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}
    staging = StagingBuffer(state)
    staging.fill(state)
    before = bytes(staging.content)
    state["a"].fill_(7.0)
    assert bytes(staging.content) == before
    staging.fill(state)
    assert torch.equal(load(bytes(staging.content))["a"], torch.full((3,), 7.0))


def test_the_bytes_lie_in_the_memory_that_was_given() -> None:
    given: list[torch.Tensor] = []

    def allocate(size: int) -> torch.Tensor:
        given.append(torch.zeros(size, dtype=torch.uint8))
        return given[0]

    staging = StagingBuffer(TENSORS, allocate)
    staging.fill(TENSORS)
    assert given[0].numpy().tobytes() == bytes(to_safetensors(TENSORS))


def test_tensors_that_are_not_contiguous_are_copied_by_value() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert torch.equal(load(bytes(to_safetensors({"a": matrix.T})))["a"], matrix.T)
