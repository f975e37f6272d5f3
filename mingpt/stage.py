"""The bytes of a safetensors file in one buffer, written over for every snapshot.

The copy into it is the only part of a snapshot that training waits for, and it is no more than a copy: the buffer's pages are there
already, the header stands at the front, and every tensor has its place. What then is hashed and written is the buffer itself.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The front of a safetensors file and where in it each tensor begins. Large elements come first, so that all are aligned; then by name."""
    described: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        described[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    words = json.dumps(described, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    front = len(words).to_bytes(8, "little") + words
    return front, {name: len(front) + about["data_offsets"][0] for name, about in described.items()}


class Stage:
    """Room for one state. `tensors` say which names, shapes and types it has; `reserve` gives that many bytes, ordinary memory by default."""

    def __init__(self, tensors: Mapping[str, Tensor], reserve: Callable[[int], Tensor] | None = None) -> None:
        front, places = header(tensors)
        size = len(front) + sum(tensor.nbytes for tensor in tensors.values())
        # Pages that the device can write to directly, where there is one.
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        self.buffer = reserve(size) if reserve else torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()  # which touches every page
        self.buffer[: len(front)] = torch.frombuffer(bytearray(front), dtype=torch.uint8)
        self.slots = {
            name: self.buffer[place : place + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, place in places.items()
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a state in; on return it may change again."""
        devices = {tensors[name].device for name in self.slots if tensors[name].is_cuda}
        for name, slot in self.slots.items():
            slot.copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)

    @property
    def content(self) -> memoryview:
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]


def pack(tensors: Mapping[str, Tensor]) -> memoryview:
    """A safetensors file's bytes."""
    stage = Stage(tensors)
    stage.fill(tensors)
    return stage.content
