"""A staging buffer that holds the bytes of a safetensors file and is overwritten for each snapshot.

Copying into it is the only part of a snapshot that training waits for, and it is nothing but a copy: the
pages exist, the header is in place, and each tensor has its offset. What is hashed and written is the buffer
itself.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def make_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file, and the offset in the file at which each tensor begins.

    Tensors are ordered by element size, largest first, so that all are aligned; then by name.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        data_offsets = [offset, offset + tensor.nbytes]
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": data_offsets,
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}


class StagingBuffer:
    """Room for one state with names, shapes and types of `tensors`; `allocate` may provide the bytes."""

    def __init__(
        self, tensors: Mapping[str, Tensor], allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        header, offsets = make_header(tensors)
        size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        if allocate:
            self.buffer = allocate(size)
        else:
            # A GPU writes to pinned pages directly; zeroing faults in every page.
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()
        self.buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.slots = {}
        for name, offset in offsets.items():
            tensor = tensors[name]
            self.slots[name] = (
                self.buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            )

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a state into the buffer; on return it may change again."""
        devices = {tensors[name].device for name in self.slots if tensors[name].is_cuda}
        for name, slot in self.slots.items():
            slot.copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)

    @property
    def content(self) -> memoryview:
        """The bytes of the safetensors file."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]


def to_safetensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """The bytes of a safetensors file."""
    staging = StagingBuffer(tensors)
    staging.fill(tensors)
    return staging.content
