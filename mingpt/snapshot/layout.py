"""The names of a snapshot's files, the place of each tensor in its file, and a buffer for the tensors.

The snapshot of step 1200 has the manifest `step_00001200.json`. The optimizer's state, if any, is in
`step_00001200.optimizer.safetensors`, all other tensors (the weights) are in `step_00001200.safetensors`, and
the tokenizer, if any, is in `step_00001200.tokenizer`. Sampling and export can therefore leave the
optimizer's state unread. The place of a tensor in its file depends only on the names, types and shapes of the
tensors in this file.
"""

import contextlib
import functools
import json
import logging
import math
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import PIECE_BYTES

log = logging.getLogger(__name__)
FILE_NAME = re.compile(r"step_([0-9]{8,19})\.(json|safetensors|optimizer\.safetensors|tokenizer)")
UNFINISHED = re.compile(r"partial-step_([0-9]{8,19})")
# What a killed job leaves: a mark of an unfinished save, or a file that was being written.
LEFTOVER = re.compile(rf"partial-({FILE_NAME.pattern}|(partial-)?step_[0-9]{{8,19}}|probe-[0-9a-f]{{32}})")
# A file of a snapshot that is set aside: see Store.quarantine.
SET_ASIDE = re.compile(rf"(damaged|suspect)-[1-9][0-9]*-{FILE_NAME.pattern}")
KINDS = ("safetensors", "optimizer.safetensors")  # of tensor files, weights first
TOKENIZER = "tokenizer"  # the kind of the file with the tokenizer's bytes
OPTIMIZER = "optimizer."  # prefix of the names of optimizer state
LENGTH_BYTES = 8  # at the start of a file: the length of its header
MAX_HEADER = 4 << 20  # bytes; gpt2-xl and its optimizer take a tenth of it
# The types of https://huggingface.co/docs/safetensors that torch has.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_name(step: int, kind: str) -> str:
    """Return the name of the file of this kind in the snapshot of `step`.

    `kind` is "json" (the manifest), TOKENIZER, or one of KINDS (tensors).
    """
    return f"step_{step:08d}.{kind}"


def unfinished_name(step: int) -> str:
    """Return the name of the empty file that marks the save of `step` as unfinished."""
    return f"partial-step_{step:08d}"


def step_of(name: str, kind: str | None = None) -> int | None:
    """Return the step in `name` if this is the name of a snapshot's file of the given kind; else None.

    `kind` is "json" (the manifest), "safetensors" (any file that a manifest lists), or None (any file of a
    snapshot).
    """
    match = FILE_NAME.fullmatch(name)
    if not match or name != file_name(int(match[1]), match[2]):
        return None
    found = "json" if match[2] == "json" else "safetensors"
    return int(match[1]) if kind in (None, found) else None


def is_snapshot_file(name: str) -> bool:
    """Return whether `name` matches FILE_NAME, SET_ASIDE or LEFTOVER, patterns for files of a Store."""
    return any(pattern.fullmatch(name) for pattern in (FILE_NAME, SET_ASIDE, LEFTOVER))


def steps_in(names: Iterable[str], kind: str | None = None) -> list[int]:
    """Return the steps that have a file of this kind (see `step_of`) in `names`, each once, newest first."""
    found = {step_of(name, kind) for name in names}
    return sorted((step for step in found if step is not None), reverse=True)


def files_of(names: Iterable[str], step: int) -> list[str]:
    """Return those of `names` that are files of the snapshot of `step`, sorted, the manifest last."""
    found = [name for name in names if step_of(name) == step]
    return sorted(found, key=lambda name: (name.endswith(".json"), name))


def are_files_of(names: Sequence[str], step: int) -> bool:
    """Return whether a manifest of this step may list exactly the files `names`, in this order.

    The weights come first, then the optimizer's state, then the tokenizer. The optimizer's state, the
    tokenizer or both may be missing.
    """
    weights, *others = [file_name(step, kind) for kind in (*KINDS, TOKENIZER)]
    return list(names[:1]) == [weights] and list(names[1:]) in ([], others[:1], others[1:], others)


@dataclass(frozen=True)
class TensorSpec:
    """The type and shape of a tensor, or of one rank's rows of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The plan of a safetensors file: its first bytes, and where each tensor begins in the file."""

    name: str
    header: bytes  # the first bytes of the file: the length of the JSON, and the JSON
    begins: dict[str, int]  # tensor -> its offset from the file's start, in bytes; sorted, without gaps
    size: int  # bytes, header included


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def make_layout(specs: Mapping[str, TensorSpec], step: int) -> list[Layout]:
    """Return the layouts of the tensor files of `step`: the weights, then the optimizer's state, if any.

    `specs` describes the tensors that the files hold. Tensors whose names begin with OPTIMIZER belong to the
    optimizer's state.
    """
    weights = {name: spec for name, spec in specs.items() if not name.startswith(OPTIMIZER)}
    optimizer = {name: spec for name, spec in specs.items() if name.startswith(OPTIMIZER)}
    groups = [weights, optimizer] if optimizer else [weights]
    return [file_layout(file_name(step, kind), group) for kind, group in zip(KINDS, groups, strict=False)]


def file_layout(name: str, specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of the file `name`, which holds all tensors of `specs`.

    The tensors are sorted by the size of an element, largest first, so that each tensor is aligned. Tensors
    with elements of the same size are sorted by name.
    """
    return lay_out(name, dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))))


def lay_out(name: str, specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of the file `name`, which holds the tensors in the order of `specs`, without gaps.

    Raises UserError if the header would have more than MAX_HEADER bytes.
    """
    entries, begins, position = dict[str, Any](), dict[str, int](), 0
    for tensor, spec in specs.items():
        begins[tensor] = position
        entry = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
        entries[tensor] = entry | {"data_offsets": [position, position + spec.nbytes]}
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UserError(f"{len(specs):,} tensors are too many for a snapshot: save fewer, larger ones")
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    begins = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return Layout(name, header, begins, len(header) + position)


class Staging:
    """CPU memory for a copy of tensors that have the names, types and shapes of `tensors`.

    The constructor allocates the memory; `fill` copies tensors into it. If any of `tensors` is on a CUDA GPU,
    the memory's pages are locked (pinned) if CUDA can lock them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        specs = specs_of(tensors)
        layout = file_layout("", specs)  # one file, whatever its size
        # Zeroing faults in every page.
        self.buffer = torch.empty(layout.size, dtype=torch.uint8, device="cpu").zero_()
        if any(tensor.is_cuda for tensor in tensors.values()):
            self.lock_pages()
        self.parts: dict[str, Tensor] = {}  # the bytes of each tensor: uint8, one-dimensional
        self.slots: dict[str, Tensor] = {}  # the same memory, with the tensor's type and shape
        for name, begin in layout.begins.items():
            spec = specs[name]
            self.parts[name] = self.buffer[begin : begin + spec.nbytes]
            self.slots[name] = self.parts[name].view(spec.dtype).view(spec.shape)

    def lock_pages(self) -> None:
        """Have CUDA lock (pin) the buffer's pages until this Staging is freed.

        A copy from the GPU to pages that are not locked blocks the host. torch's pinned memory is not used,
        because torch would round the buffer's size up to a power of two. A failure to lock raises nothing.
        """
        runtime, address = torch.cuda.cudart(), self.buffer.data_ptr()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(address, self.buffer.nbytes, 0))
        except RuntimeError as error:
            # CUDA reports the error once more when the next kernel starts: start one here, and ignore that.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            log_unlocked(str(error).partition(" (")[0])
        else:
            # If pages stayed registered, CUDA would take later memory at this address for locked pages.
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the buffer, except tensors for which the buffer has no place.

        On return the caller may change the tensors, because copies from GPUs have also ended.
        """
        devices = {tensors[name].device for name in self.slots if tensors[name].is_cuda}
        for name, slot in self.slots.items():
            slot.copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)

    def pieces(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield the bytes of the tensors `names`: uint8 views of the buffer, of at most PIECE_BYTES each."""
        for name in names:
            yield from (piece for piece in self.parts[name].split(PIECE_BYTES) if len(piece))


@functools.cache  # once per process, whatever the number of buffers
def log_unlocked(reason: str) -> None:
    log.info(f"the GPU copies a state for snapshots more slowly: CUDA cannot lock host memory ({reason})")


def memory_of(piece: Tensor) -> memoryview:
    """Return the writable memory of a one-dimensional uint8 tensor on the CPU, without copying it."""
    return memoryview(piece.numpy())  # type: ignore[arg-type]
