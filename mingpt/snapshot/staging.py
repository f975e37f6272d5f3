"""A staging buffer that holds a copy of tensors and is overwritten for each snapshot.

Copying into it is the only part of a snapshot that training waits for, and it is nothing but a copy: the
pages exist, and each tensor has its place. What is hashed and written is the buffer itself.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from mingpt.snapshot.layout import FileLayout, file_layout, file_order, specs_of

CHUNK_BYTES = 16 << 20


class StagingBuffer:
    """Room for tensors with names, shapes and types of `tensors`, one after the other.

    With `layout` the buffer is that safetensors file. `allocate` may provide the bytes.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        allocate: Callable[[int], Tensor] | None = None,
        layout: FileLayout | None = None,
    ) -> None:
        specs = specs_of(tensors)
        order = file_order(specs)
        begins, size = {}, 0
        for name in order:
            begins[name] = size
            size += specs[name].nbytes
        if layout:
            begins, size = layout.begins, layout.size
        if allocate:
            self.buffer = allocate(size)
        else:
            # A GPU writes to pinned pages directly; zeroing faults in every page.
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()
        if layout:
            header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            self.buffer[: len(header)] = header
        self.ranges = {name: (begins[name], begins[name] + specs[name].nbytes) for name in order}
        self.slots = {
            name: self.buffer[begin:end].view(specs[name].dtype).view(specs[name].shape)
            for name, (begin, end) in self.ranges.items()
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a state into the buffer; on return it may change again."""
        devices = {tensors[name].device for name in self.slots if tensors[name].is_cuda}
        for name, slot in self.slots.items():
            slot.copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, which are not copied."""
        begin, end = self.ranges[name]
        return self.content[begin:end]

    @property
    def content(self) -> memoryview:
        """All bytes."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]


class LocalChunks:
    """A file whose tensors all lie in `staging`, in pieces of at most 16 MiB; can be read more than once."""

    def __init__(self, layout: FileLayout, staging: StagingBuffer) -> None:
        self.layout, self.staging = layout, staging

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.layout.header)
        for name in self.layout.begins:
            yield from pieces_of(self.staging.view(name))


def pieces_of(content: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Consecutive pieces of at most `size` bytes."""
    for begin in range(0, len(content), size):
        yield content[begin : begin + size]


def to_safetensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """The bytes of one safetensors file."""
    staging = StagingBuffer(tensors, layout=file_layout("", specs_of(tensors)))
    staging.fill(tensors)
    return staging.content
