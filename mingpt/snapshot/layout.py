"""Which tensor lies where in the files of a snapshot.

Weights and optimizer state lie in files of their own, so that whoever samples or exports reads weights alone.
A group that is too large for one file is cut into parts. Where depends on the tensors' names, types and
shapes and on `part_bytes`, never on the number of workers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.snapshot.names import GROUPS, MAX_PARTS, tensor_file_name

PART_BYTES = 4 << 30
OPTIMIZER = "optimizer."  # the names of optimizer state begin so
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a file has to know of a full (unsharded) tensor before there are any values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file: its first bytes, and where in it each tensor begins."""

    name: str
    header: bytes  # the first bytes of the file: the length of the JSON, and the JSON
    begins: dict[str, int]  # tensor: offset from the file's start; in the order of the offsets, without gaps
    size: int  # bytes, header included


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def make_layout(specs: Mapping[str, TensorSpec], step: int, part_bytes: int = PART_BYTES) -> list[FileLayout]:
    """The files of the snapshot of `step`: that of the weights, then that of the optimizer's state, if any.

    A group of more than `part_bytes` with its header is cut into parts: each takes tensors in their order
    until the next one would not fit. A tensor that is larger than a part is alone in one, which is then as
    large. Raises ValueError if there would be more than 99,999.
    """
    layouts = []
    for group in GROUPS:
        chosen = {name: specs[name] for name in specs if name.startswith(OPTIMIZER) == bool(group)}
        parts = split(chosen, part_bytes)
        if group and not chosen:
            continue
        if len(parts) > MAX_PARTS:
            raise ValueError(f"parts of {part_bytes} bytes are too small: there would be {len(parts):,}")
        for number, part in enumerate(parts, start=1):
            layouts.append(file_layout(tensor_file_name(step, group, number, len(parts)), part))
    return layouts


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """By element size, largest first, so that all are aligned; then by name."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def split(specs: Mapping[str, TensorSpec], part_bytes: int) -> list[dict[str, TensorSpec]]:
    """The tensors of each part, in the order of the file; at least one part, which may be empty."""
    parts: list[dict[str, TensorSpec]] = [{}]
    text_bytes, data_bytes = 0, 0  # of the part: entries of the header, tensors
    for name in file_order(specs):
        spec = specs[name]
        added = len(entry_text(name, spec, data_bytes))
        if parts[-1] and file_bytes(text_bytes + added, data_bytes + spec.nbytes) > part_bytes:
            parts.append({})
            text_bytes, data_bytes = 0, 0
            added = len(entry_text(name, spec, 0))
        parts[-1][name] = spec
        text_bytes, data_bytes = text_bytes + added, data_bytes + spec.nbytes
    return parts


def file_bytes(text_bytes: int, data_bytes: int) -> int:
    """The size of a file whose header has entries of so many bytes, each with the comma or { before it."""
    return 8 + text_bytes + 1 + -(text_bytes + 1) % 8 + data_bytes


def entry_text(name: str, spec: TensorSpec, begin: int) -> str:
    """A tensor in a header, with the comma (or the first one's brace) before it.

    `begin` counts from the first tensor's.
    """
    entry: dict[str, Any] = {
        "dtype": DTYPES[spec.dtype],
        "shape": list(spec.shape),
        "data_offsets": [begin, begin + spec.nbytes],
    }
    return f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"


def file_layout(name: str, specs: Mapping[str, TensorSpec]) -> FileLayout:
    """One file that holds all these tensors."""
    texts, begins, position = [], {}, 0
    for tensor in file_order(specs):
        texts.append(entry_text(tensor, specs[tensor], position))
        begins[tensor] = position
        position += specs[tensor].nbytes
    text = ("{" + "".join(texts)[1:] + "}").encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    begins = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return FileLayout(name, header, begins, len(header) + position)
