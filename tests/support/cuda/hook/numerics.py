"""Arithmetic for the CUDA stand-in: each operation's result, computed on the CPU in the same memory.

The CUDA host code of an operation runs first; its kernels do nothing. Then its inputs and outputs are taken
as CPU tensors of the same memory, and the CPU's operation fills the outputs. The stand-in's library also
learns here which memory each operation reads and writes, and where in the program the host waits.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

library = ctypes.CDLL(None)
STREAM = ADDRESS = ctypes.c_void_p
library.standin_begin.argtypes = library.standin_captures.argtypes = [STREAM]
library.standin_access.argtypes = [STREAM, ADDRESS, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
HERE = os.path.dirname(os.path.abspath(__file__))
# Operations that change no memory, or that the runtime does.
NO_ARITHMETIC = {
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_local_scalar_dense",
    "set_",
    "detach",
    "alias",
}
in_thread = threading.local()


def is_cuda(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def on_cpu(value: Any) -> Any:
    """Return a CPU tensor of a CUDA tensor's memory; the CPU in place of a GPU; another value as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return torch.default_generator
    if not is_cuda(value):
        return value
    if not value.numel():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    storage = value.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    base = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(base, value.storage_offset(), value.size(), value.stride())


# Operations without a CPU kernel, or with one of other bits; they get outputs and arguments on the CPU.


def attention(out: Sequence[Tensor], a: Sequence[Any], is_causal: bool, scale: float | None) -> None:
    y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*a[:3], 0.0, is_causal, scale=scale)
    out[0].copy_(y)
    if out[1].numel():
        out[1][..., : sums.size(-1)].copy_(sums)


def attention_backward(
    out: Sequence[Tensor], dy: Tensor, qkv: Sequence[Tensor], y: Tensor, sums: Tensor, *options: Any
) -> None:
    is_causal, scale = options
    sums = sums[..., : y.size(-2)].contiguous()
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for result, value in zip(out, backward(dy, *qkv, y, sums, 0.0, is_causal, scale=scale), strict=False):
        result.copy_(value)


def flash(out: Any, *a: Any, scale: float | None = None) -> None:
    attention(out, a, a[4] if len(a) > 4 else False, scale)


def flash_backward(out: Any, *a: Any, scale: float | None = None) -> None:
    attention_backward(out, a[0], a[1:4], a[4], a[5], a[11], scale)


def efficient(out: Any, *a: Any, scale: float | None = None) -> None:
    attention(out, a, a[6] if len(a) > 6 else False, scale)


def efficient_backward(out: Any, *a: Any, scale: float | None = None) -> None:
    attention_backward(out, a[0], a[1:4], a[5], a[6], a[11] if len(a) > 11 else False, scale)


def rms_norm_backward(
    out: Any, dy: Tensor, x: Tensor, shape: Any, inverse: Tensor, weight: Tensor | None, mask: Any
) -> None:
    """Fill the gradient of `x` alone: no model here has a weight in its norm."""
    assert weight is None
    dy, wide, inverse = dy.float(), x.float(), inverse.reshape(*x.shape[:-1], 1).float()
    out[0].copy_(inverse * (dy - wide * inverse * inverse * (dy * wide).mean(-1, keepdim=True)))


def fused_adamw(out: object, *lists: Any, **options: Any) -> None:
    """Pad the tensors: the CPU's kernel rounds a tail of less than 16 elements differently."""
    padded = [[torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 16)) for t in ts] for ts in lists[:4]]
    torch.ops.aten._fused_adamw_(*padded, *lists[4:], **options)
    for i in (0, 2, 3):
        for tensor, whole in zip(lists[i], padded[i], strict=True):
            tensor.copy_(whole[: tensor.numel()].view(tensor.shape))


SPECIAL: Mapping[str, Callable[..., None]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_fused_adamw_": fused_adamw,
}


def is_plain_copy(target: Tensor, source: Tensor) -> bool:
    """Return whether the runtime copies the bytes itself, between host and device."""
    same = target.dtype == source.dtype and target.device.type != source.device.type
    return same and target.is_contiguous() and source.is_contiguous()


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the CUDA tensors that the operation changes, by its schema."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return list(filter(is_cuda, tree_leaves([given.get(name) for name in changes])))


def is_view(func: Any) -> bool:
    kinds = [result.alias_info for result in func._schema.returns]
    return bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)


def note_access(stream: int, tensors: Iterable[Tensor], writes: bool, name: bytes) -> None:
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
            library.standin_access(
                stream, tensor.data_ptr(), (last + 1) * tensor.element_size(), writes, name
            )


class Numerics(TorchDispatchMode):
    """Computes what each CUDA operation of this thread has left out."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        read = [leaf for leaf in tree_leaves((args, kwargs)) if is_cuda(leaf)]
        if read:
            library.standin_begin(torch.cuda.current_stream().cuda_stream)
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if is_cuda(leaf)]
        name = func._schema.name.split("::")[1]
        if not (read or results) or name in NO_ARITHMETIC or is_view(func):
            return out
        if func.namespace not in ("aten", "fsdp", "prims") or name.startswith(("empty", "new_empty")):
            return out
        stream = torch.cuda.current_stream().cuda_stream
        if library.standin_captures(stream):
            return out
        written = written_arguments(func, args, kwargs)
        library.standin_begin(stream)
        note_access(stream, read, False, name.encode())
        note_access(stream, written or results, True, name.encode())
        with torch.no_grad():
            self.compute(func, name, args, kwargs, out, bool(written))
        return out

    def compute(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, in_place: bool
    ) -> None:
        a, k, results = tree_map(on_cpu, (args, dict(kwargs), out))
        k.pop("pin_memory", None)
        if name == "copy_":
            if not is_plain_copy(args[0], args[1]):
                a[0].copy_(a[1])
        elif name in ("_to_copy", "_copy_from", "_copy_from_and_resize"):
            if not is_plain_copy(out, args[0]):
                results.copy_(a[0])
        elif name in SPECIAL:
            SPECIAL[name](results, *a, **k)
        else:
            found = func(*a, **k)
            if not in_place:
                for result, value in zip(tree_leaves(results), tree_leaves(found), strict=True):
                    if isinstance(result, Tensor) and result.numel():
                        result.copy_(value)


def place() -> str:
    """Return file and line of the innermost frame outside of torch and of this folder."""
    frame = sys._getframe(1)
    while frame.f_back:
        path = frame.f_code.co_filename
        if "site-packages" not in path and not path.startswith((HERE, "<", sys.base_prefix)):
            return f"{os.path.relpath(path)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the program"


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
def write_place(buffer: int, size: int) -> None:
    text = place().encode()[: size - 1] + b"\0"
    ctypes.memmove(buffer, text, len(text))


def compute_here() -> None:
    """Let this thread's operations have results."""
    if not hasattr(in_thread, "mode"):
        in_thread.mode = Numerics()
        in_thread.mode.__enter__()


def install() -> None:
    """Compute in this thread, in those started from now on, and in those that ask for a GPU.

    Environment variable STANDIN_NUMERICS=0: in none; torch.compile compiles nothing under a dispatch mode.
    """
    library.standin_set_place(write_place)
    if os.environ.get("STANDIN_NUMERICS") == "0":
        return
    compute_here()
    run, is_available = threading.Thread.run, torch.cuda.is_available
    threading.Thread.run = lambda thread: [compute_here(), run(thread)][1]  # type: ignore[method-assign]
    torch.cuda.is_available = lambda: [compute_here(), is_available()][1]
