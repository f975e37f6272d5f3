"""Arithmetic for the CUDA stand-in: each operation's result, computed on the CPU in the same memory.

The CUDA host code of an operation runs first; its kernels do nothing. Then its inputs and outputs are taken as
CPU tensors of the same memory, and the CPU's operation fills the outputs. The stand-in's library also learns
here which memory each operation reads and writes, and where in the program the host waits.
"""

import ctypes
import math
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
library.standin_begin.argtypes = [ctypes.c_void_p]
library.standin_captures.argtypes = [ctypes.c_void_p]
library.standin_access.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_char_p,  # fmt: skip
]
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


# Operations without a CPU kernel, or with one of other bits. Each gets the arguments and the outputs on the CPU.


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the logarithm of the sums of exponentials, and the weights."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    sums = scores.logsumexp(-1)
    weights = torch.exp(scores - sums.unsqueeze(-1))
    return weights @ v.float(), sums, weights


def attention_forward(causal_at: int) -> Callable[..., None]:
    def compute(out: Sequence[Tensor], *a: Any, scale: float | None = None, **options: Any) -> None:
        causal = a[causal_at] if len(a) > causal_at else options.get("is_causal", False)
        y, sums, _ = attention(*a[:3], causal, scale or 1 / math.sqrt(a[0].size(-1)))
        out[0].copy_(y)
        if out[1].numel():
            out[1][..., : sums.size(-1)].copy_(sums)

    return compute


def attention_backward(out: Sequence[Tensor], *a: Any, scale: float | None = None, **options: Any) -> None:
    causal = a[11] if len(a) > 11 else options.get("is_causal", False)
    dy, q, k, v = (tensor.float() for tensor in a[:4])
    scale = scale or 1 / math.sqrt(q.size(-1))
    _, _, weights = attention(q, k, v, causal, scale)
    d_weights = dy @ v.transpose(-1, -2)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    out[0].copy_(d_scores @ k * scale)
    out[1].copy_(d_scores.transpose(-1, -2) @ q * scale)
    out[2].copy_(weights.transpose(-1, -2) @ dy)


def rms_norm(out: Sequence[Tensor], x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> None:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
    out[0].copy_(wide * inverse if weight is None else wide * inverse * weight.float())
    out[1].copy_(inverse.reshape(out[1].shape))


def rms_norm_backward(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    shape: Any,
    inverse: Tensor,
    weight: Tensor | None,
    mask: Any,
) -> None:
    wide, inverse = x.float(), inverse.reshape(*x.shape[:-1], 1).float()
    dy = dy.float() if weight is None else dy.float() * weight.float()
    out[0].copy_(inverse * (dy - wide * inverse * inverse * (dy * wide).mean(-1, keepdim=True)))


def dropout(out: Sequence[Tensor], x: Tensor, p: float, train: bool) -> None:
    kept = torch.rand(x.shape) >= p
    out[0].copy_(x * kept / (1 - p))
    out[1].copy_(kept)


def fused_adamw(out: object, *lists: Any, **options: Any) -> None:
    """Pad the tensors: the CPU's kernel rounds a tail of less than 16 elements differently."""
    padded = [
        [torch.cat([tensor.reshape(-1), tensor.new_zeros(-tensor.numel() % 16)]) for tensor in tensors]
        for tensors in lists[:4]
    ]
    torch.ops.aten._fused_adamw_(*padded, *lists[4:], **options)
    for i in (0, 2, 3):
        for tensor, whole in zip(lists[i], padded[i], strict=True):
            tensor.copy_(whole[: tensor.numel()].view(tensor.shape))


SPECIAL: Mapping[str, Callable[..., None]] = {
    "_scaled_dot_product_flash_attention": attention_forward(4),
    "_scaled_dot_product_efficient_attention": attention_forward(6),
    "_scaled_dot_product_flash_attention_backward": attention_backward,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "native_dropout": dropout,
    "_fused_adamw_": fused_adamw,
}


def is_plain_copy(target: Tensor, source: Tensor) -> bool:
    """Return whether the runtime copies the bytes itself, between host and device."""
    same = target.dtype == source.dtype and target.device.type != source.device.type
    return same and target.is_contiguous() and source.is_contiguous()


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the CUDA tensors that the operation changes, by its schema."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if is_cuda(leaf)]
    return found


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


def ensure() -> None:
    """Let this thread's operations have results."""
    if not getattr(in_thread, "mode", None):
        in_thread.mode = Numerics()
        in_thread.mode.__enter__()


def before(function: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return both


def install() -> None:
    """Compute in this thread, in those started from now on, and in those that ask for a GPU.

    Environment variable STANDIN_NUMERICS=0: in none; torch.compile compiles nothing under a dispatch mode.
    """
    library.standin_set_place(write_place)
    if os.environ.get("STANDIN_NUMERICS") == "0":
        return
    ensure()
    threading.Thread.run = before(threading.Thread.run, ensure)  # type: ignore[method-assign]
    torch.cuda.is_available = before(torch.cuda.is_available, ensure)
