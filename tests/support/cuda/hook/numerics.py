"""Computes the results of CUDA operations on the CPU, in the same memory, for the CUDA stand-in.

The stand-in's kernels do nothing. The CPU's operation fills the outputs after the CUDA host code has run.
"""

import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
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
NO_ARITHMETIC = {"record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "set_", "detach"}
in_thread = threading.local()


def is_cuda(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def on_cpu(value: Any) -> Any:
    """Return the CPU's device, its generator, or a CPU tensor in the CUDA tensor's memory; else `value`."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return torch.default_generator
    if not is_cuda(value):
        return value
    if not value.numel():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    storage = value.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    base = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(base, value.storage_offset(), value.size(), value.stride())


def fill(outputs: Any, values: Any) -> None:
    for output, value in zip(tree_leaves(outputs), tree_leaves(values), strict=False):
        if isinstance(output, Tensor) and output.numel():  # the sums of attention's rows are padded
            (output[..., : value.size(-1)] if output.dim() == 3 else output).copy_(value)


# Operations that the CPU has under another name, not at all, or with other bits. `a` are the arguments.


def attention(a: Sequence[Any], causal_at: int, scale: float | None = None, **options: Any) -> Any:
    is_causal = a[causal_at] if len(a) > causal_at else options.get("is_causal", False)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*a[:3], 0.0, is_causal, scale=scale)


def attention_backward(a: Sequence[Any], y_at: int, scale: float | None = None) -> Any:
    is_causal = a[11] if len(a) > 11 else False
    saved = (a[y_at], a[y_at + 1][..., : a[1].size(-2)].contiguous())
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(*a[:4], *saved, 0.0, is_causal, scale=scale)


def rms_norm_backward(dy: Tensor, x: Tensor, shape: Any, inverse: Tensor, weight: None, mask: Any) -> Tensor:
    """Return the gradient of `x`; no model here has a weight in its norm."""
    dy, wide, inverse = dy.float(), x.float(), inverse.reshape(*x.shape[:-1], 1).float()
    return inverse * (dy - wide * inverse * inverse * (dy * wide).mean(-1, keepdim=True))


def fused_adamw(*lists: Any, **options: Any) -> None:
    """Run the CPU's AdamW on padded tensors: a tail of less than 16 elements would get other bits."""
    padded = [[torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 16)) for t in ts] for ts in lists[:4]]
    torch.ops.aten._fused_adamw_(*padded, *lists[4:], **options)
    for i in (0, 2, 3):
        fill(lists[i], [p[: t.numel()].view(t.shape) for t, p in zip(lists[i], padded[i], strict=True)])


SPECIAL: Mapping[str, Any] = {
    "_scaled_dot_product_flash_attention": lambda *a, **k: attention(a, 4, **k),
    "_scaled_dot_product_efficient_attention": lambda *a, **k: attention(a, 6, **k),
    "_scaled_dot_product_flash_attention_backward": lambda *a, **k: attention_backward(a, 4, **k),
    "_scaled_dot_product_efficient_attention_backward": lambda *a, **k: attention_backward(a, 5, **k),
    "_fused_rms_norm_backward": rms_norm_backward,
    "_fused_adamw_": fused_adamw,
    "_copy_from": lambda source, target, *rest: source,
}


def copied_by_runtime(target: object, source: object) -> bool:
    if not (isinstance(target, Tensor) and isinstance(source, Tensor)) or target.dtype != source.dtype:
        return False
    crosses = target.device.type != source.device.type
    return crosses and target.is_contiguous() and source.is_contiguous()


def note_access(stream: int, tensors: Iterable[Tensor], writes: bool, name: str) -> None:
    for tensor in filter(Tensor.numel, tensors):
        last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size()
        library.standin_access(stream, tensor.data_ptr(), size, writes, name.encode())


class Numerics(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, vars(func)["_schema"]
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        read = list(filter(is_cuda, tree_leaves((args, kwargs))))
        if read:
            library.standin_begin(torch.cuda.current_stream().cuda_stream)
        out = func(*args, **kwargs)
        results = list(filter(is_cuda, tree_leaves(out)))
        name = schema.name.split("::")[1]
        returned = [value.alias_info for value in schema.returns]
        is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        does_nothing = name in NO_ARITHMETIC or name.startswith(("empty", "new_empty")) or is_view
        if does_nothing or not (read or results) or func.namespace not in ("aten", "fsdp", "prims"):
            return out
        stream = torch.cuda.current_stream().cuda_stream
        if not library.standin_captures(stream):
            changes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
            names = [argument.name for argument in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            written = [given.get(one) for one, is_written in zip(names, changes, strict=True) if is_written]
            library.standin_begin(stream)
            note_access(stream, read, False, name)
            note_access(stream, filter(is_cuda, tree_leaves(written)) if written else results, True, name)
            with torch.no_grad():
                self.compute(func, name, args, kwargs, None if written else out)
        return out

    def compute(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        pair = args[:2] if name == "copy_" else (out, args[0] if args else None)
        if name in ("copy_", "_to_copy") and copied_by_runtime(*pair):
            return
        a, k, outputs = tree_map(on_cpu, (args, kwargs, out))
        k.pop("pin_memory", None)
        values = SPECIAL.get(name, func)(*a, **k)
        if outputs is not None:
            fill(outputs, values)


def place() -> str:
    frame: Any = inspect.currentframe()
    elsewhere = (HERE, "<", sys.base_prefix)
    while frame.f_back and (
        "site-packages" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(elsewhere)
    ):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)  # type: ignore[untyped-decorator]
def write_place(buffer: int, size: int) -> None:
    text = place().encode()[: size - 1] + b"\0"
    ctypes.memmove(buffer, text, len(text))


def compute_here() -> bool:
    if not hasattr(in_thread, "mode"):
        in_thread.mode = Numerics()
        in_thread.mode.__enter__()
    return True


def install() -> None:
    """Compute CUDA operations' results in this thread, in later threads, and in callers of is_available.

    STANDIN_NUMERICS=0 prevents this, because torch.compile compiles nothing under a dispatch mode.
    """
    library.standin_set_place(write_place)
    if os.environ.get("STANDIN_NUMERICS") != "0":
        compute_here()
        run, is_available = threading.Thread.run, torch.cuda.is_available
        replacements: Any = threading.Thread, torch.cuda
        replacements[0].run = lambda thread: compute_here() and run(thread)
        replacements[1].is_available = lambda: compute_here() and is_available()
