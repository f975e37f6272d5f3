"""The safetensors format, read strictly: 8 bytes with the header's length, the header as JSON, the tensors.

The header is checked against the file's size before anything is allocated. No pickle, nothing is executed.
https://huggingface.co/docs/safetensors
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.errors import CorruptSnapshot
from mingpt.snapshot.reading import SourceFile
from mingpt.snapshot.strict_json import parse_object

LENGTH_BYTES = 8
MAX_HEADER = 4 << 20  # bytes; gpt2-xl and its optimizer take a tenth of it
MAX_DIMENSIONS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file, as offsets from the file's start."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    begin: int
    end: int


Entries = Mapping[str, TensorEntry]
# Raises CorruptSnapshot if a snapshot with this manifest cannot hold these tensors.
Check = Callable[[dict[str, Any], Entries], None]


def accept_all(manifest: dict[str, Any], entries: Entries) -> None:
    """The check of a reader to whom all tensors are alike."""


def read_checked(file: SourceFile, size: int, check: Callable[[Entries], None]) -> bytes:
    """The content of a safetensors file of so many bytes; its header is checked before the rest is read.

    Raises CorruptSnapshot, or UnreadableSnapshot if reading fails.
    """
    first = file.read(0, min(size, LENGTH_BYTES))
    end = LENGTH_BYTES + header_length(first, size)
    header = file.read(LENGTH_BYTES, end)
    check(parse_header(header, size))
    content = file.read(0, size)
    if content[LENGTH_BYTES:end] != header:
        raise CorruptSnapshot("its tensor file has changed while it was read")
    return content


def header_length(first: bytes, file_size: int) -> int:
    """In bytes, from the first 8 bytes of a file. Raises CorruptSnapshot."""
    if len(first) < LENGTH_BYTES:
        raise CorruptSnapshot(f"its tensor file has {file_size} bytes and no header")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER, file_size - LENGTH_BYTES):
        raise CorruptSnapshot(f"the header of its tensor file cannot have {length:,} bytes")
    return length


def parse_header(header: bytes, file_size: int) -> dict[str, TensorEntry]:
    """The tensors of a file, by name. Raises CorruptSnapshot unless they fill the file without gaps."""
    parsed = parse_object(header, "the header of its tensor file")
    parsed.pop("__metadata__", None)
    start = LENGTH_BYTES + len(header)
    entries = {name: parse_entry(name, value, start) for name, value in parsed.items()}
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise wrong(name, "its bytes do not begin where those before it end")
        position = entry.end
    if position != file_size:
        raise CorruptSnapshot(f"its tensors end at byte {position:,} of {file_size:,}")
    return entries


def parse_entry(name: str, value: Any, start: int) -> TensorEntry:
    """One tensor of the header, whose tensors' bytes begin at `start`. Raises CorruptSnapshot."""
    if not name or len(name) > 500 or any(mark in name for mark in "/\\\0"):
        raise wrong(name, "this is no name for a tensor")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong(name, "it must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(name, "its dtype is not known")
    if not is_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise wrong(name, "its shape is not a list of sizes")
    if not is_counts(offsets) or len(offsets) != 2:
        raise wrong(name, "its data_offsets are not two positions")
    if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise wrong(name, "its shape does not fit its data_offsets")
    return TensorEntry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def is_counts(value: Any) -> bool:
    """Whether a value from JSON is a list of whole numbers from 0 to below 2**63."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def wrong(name: str, reason: str) -> CorruptSnapshot:
    return CorruptSnapshot(f"its tensor {name[:100]!r}: {reason}")


def read_entries(content: bytes) -> dict[str, TensorEntry]:
    """The tensors of a whole file, by name. Raises CorruptSnapshot."""
    length = header_length(content[:LENGTH_BYTES], len(content))
    return parse_header(content[LENGTH_BYTES : LENGTH_BYTES + length], len(content))


def tensor_views(content: bytes, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it; read only: they share memory."""
    entries = read_entries(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that bytes are not writable
        whole = torch.frombuffer(content, dtype=torch.uint8)
    return {
        name.removeprefix(prefix): view(whole, entry)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }


def view(whole: Tensor, entry: TensorEntry) -> Tensor:
    """A tensor of the file whose bytes are `whole`."""
    dtype = DTYPES[entry.dtype]
    piece = whole[entry.begin : entry.end]
    if entry.begin % dtype.itemsize:  # other programs do not align them
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)


def check_finite(content: bytes) -> None:
    """Raises CorruptSnapshot if a tensor holds NaN or an infinite number. Allocates nothing."""
    for name, tensor in tensor_views(content).items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()  # NaN if any element is
            if not math.isfinite(low) or not math.isfinite(high):
                raise wrong(name, "it holds numbers that are not finite")
