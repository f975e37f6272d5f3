import torch
from safetensors.torch import load
from support.snapshots import TENSORS

from mingpt.snapshot import LocalChunks, StagingBuffer, make_layout, specs_of, to_safetensors
from mingpt.snapshot.layout import file_layout, pieces_of


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
    assert bytes(staging.view("a")) == torch.full((3,), 7.0).numpy().tobytes()


def test_a_buffer_holds_the_tensors_and_nothing_else() -> None:
    staging = StagingBuffer(TENSORS)
    assert len(staging.content) == sum(tensor.nbytes for tensor in TENSORS.values())


def test_the_bytes_lie_in_the_memory_that_was_given() -> None:
    given: list[torch.Tensor] = []

    def allocate(size: int) -> torch.Tensor:
        given.append(torch.zeros(size, dtype=torch.uint8))
        return given[0]

    staging = StagingBuffer(TENSORS, allocate, file_layout("", specs_of(TENSORS)))
    staging.fill(TENSORS)
    assert given[0].numpy().tobytes() == bytes(to_safetensors(TENSORS))


def test_tensors_that_are_not_contiguous_are_copied_by_value() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert torch.equal(load(bytes(to_safetensors({"a": matrix.T})))["a"], matrix.T)


def test_the_chunks_of_a_file_are_views_of_at_most_16_mib() -> None:
    tensors = {"model.a": torch.zeros(9 << 20, dtype=torch.bfloat16), "model.b": torch.zeros(3)}
    staging = StagingBuffer(tensors)
    (layout,) = make_layout(specs_of(tensors), 1)
    chunks = list(LocalChunks(layout, staging))
    assert [len(chunk) for chunk in chunks[1:]] == [12, 16 << 20, 2 << 20]
    staging.view("model.a")[-1:] = b"\7"
    assert chunks[-1][-1] == 7, "nothing is copied"
    assert [bytes(piece) for piece in pieces_of(memoryview(b"abcde"), 2)] == [b"ab", b"cd", b"e"]
