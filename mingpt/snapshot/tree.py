"""A training state as JSON and named tensors, and back into the objects of a loop, without pickle.

A state is a dict of objects with `state_dict` and `load_state_dict`, torch.Generators, tensors, and plain
values: numbers, strings, None, and lists, tuples and dicts of all these. In the JSON, which is called a tree,
a list stands for a list, and an object with one key, a type, for a value of this type: {"tensor": NAME}.
"""

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mingpt.base.errors import UserError
from mingpt.snapshot.layout import DTYPE_NAMES, TensorSpec

DICTS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def refusal(path: str, reason: str) -> UserError:
    return UserError(f"{path or 'the state'} {reason}")


def below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs of a dict, list or tuple; nothing for another value."""
    if type(value) in DICTS.values():
        return list(value.items())
    return enumerate(value) if type(value) in (list, tuple) else ()


def is_filled(value: Any) -> bool:
    """Return whether loading fills something in `value`; if not, what was saved takes its place."""
    is_own = isinstance(value, (Tensor, torch.Generator)) or has_state(value)
    return is_own or any(is_filled(one) for _, one in items_of(value))


def short_names(module: nn.Module) -> dict[str, str]:
    """Return {name in the module's state_dict: the name without what DDP and torch.compile add to it}."""
    names = list(module.state_dict())
    short = [name.replace("_orig_mod.", "") for name in names]
    while any("module." in name for name in short) and all(
        name.startswith("module.") or name == "n_averaged" for name in short  # of torch's AveragedModel
    ):
        short = [name.removeprefix("module.") for name in short]
    return dict(zip(names, short, strict=True))


class Packer:
    """Makes trees, and collects the tensors in `tensors`, each once, under a name made of its path."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[object, str] = {}  # by the memory of a tensor

    def pack(self, value: Any, path: str = "") -> Any:
        """Return the tree of `value`. Collective for DTensors.

        Raises UserError, which names the path, for what no tree can hold.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:  # JSON has no NaN, of which there are many
            return {"float": struct.pack(">d", value).hex()}
        items = [(key, self.pack(one, below(path, key))) for key, one in items_of(value)]
        if kind in (list, tuple):
            packed = [one for _, one in items]
            return packed if kind is list else {"tuple": packed}
        if kind in DICTS.values():
            return {kind.__name__: [[Packer().pack(key, below(path, key)), one] for key, one in items]}
        if isinstance(value, Tensor):
            return {"tensor": self.add(value, path)}
        if isinstance(value, torch.Generator):
            return {"generator": self.add(value.get_state(), path)}
        if isinstance(value, nn.Module):
            state, names = value.state_dict(), short_names(value)
            return {"object": self.pack({names[name]: one for name, one in state.items()}, path)}
        if has_state(value):
            return {"object": self.pack(value.state_dict(), path)}
        raise refusal(path, f"is a {kind.__module__}.{kind.__qualname__}, which no snapshot can hold")

    def add(self, tensor: Tensor, path: str) -> str:
        """Add a tensor, unless one with the same memory is there; return its name."""
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if type(own) is not Tensor or own.layout != torch.strided or own.dtype not in DTYPE_NAMES or own.is_meta:
            raise refusal(path, f"is a {type(own).__name__} of {own.dtype}, which no snapshot can hold")
        memory = own.untyped_storage().data_ptr(), own.storage_offset(), own.shape, own.stride(), own.dtype
        key = memory if own.numel() else path
        if key not in self.names:
            name = path
            while name in self.tensors:
                name += "'"
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else own
            self.tensors[name] = whole.resolve_conj().resolve_neg()
            self.names[key] = name
        return self.names[key]


def split(tree: Any) -> tuple[str, Any]:
    """Return (type, content) of a tree; ("value", tree) for a number, a string or None."""
    if isinstance(tree, list):
        return "list", tree
    return next(iter(tree.items())) if isinstance(tree, dict) else ("value", tree)


def like(own: Tensor, whole: Tensor) -> Tensor:
    """Return `whole`, as a DTensor with the mesh and placements of `own` if that is one of the same shape."""
    if not isinstance(own, DTensor) or own.shape != whole.shape:
        return whole
    return distribute_tensor(
        whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None  # each rank has all of it
    )


class Filler:
    """Fills states from trees. `specs` describes the saved tensors, and `read` returns one by its name."""

    def __init__(self, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
        self.specs, self.read = specs, read

    def unpack(self, tree: Any) -> Any:
        """Return the value that a tree stands for; the state_dict in place of an object."""
        kind, content = split(tree)
        if kind in ("tensor", "generator"):
            return self.read(content)
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if kind in DICTS:
            return DICTS[kind]({self.unpack(key): self.unpack(one) for key, one in content})
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(self.unpack, content))
        return self.unpack(content) if kind == "object" else content

    def children(self, tree: Any) -> dict[Any, Any]:
        """Return {key: tree of the value} of a tree that stands for a dict, list or tuple."""
        kind, content = split(tree)
        if kind in DICTS:
            return {self.unpack(key): one for key, one in content}
        return dict(enumerate(content)) if kind in ("list", "tuple") else {}

    def check(self, target: Any, tree: Any, path: str = "") -> None:
        """Raise UserError, which names the path, if the tree is not that of a state like `target`."""
        kind, content = split(tree)
        expected = type(target).__name__
        if isinstance(target, Tensor):
            expected = "tensor"
        elif isinstance(target, torch.Generator):
            expected = "generator"
        elif has_state(target):
            expected = "object"
        elif not is_filled(target):
            return
        if kind != expected:
            raise refusal(path, f"is a {expected} in the state, and a {kind} in the snapshot")
        if expected == "tensor":
            self.check_tensor(target, content, path, same_type=True)
        elif isinstance(target, nn.Module):
            state, names = target.state_dict(), short_names(target)
            own, saved = {names[name]: one for name, one in state.items()}, self.children(content)
            check_keys(own.keys(), saved.keys(), path)
            for name, one in own.items():
                if isinstance(one, Tensor):
                    self.check_tensor(one, split(saved[name])[1], below(path, name))
        elif expected not in ("generator", "object"):
            saved = self.children(tree)
            check_keys(dict(items_of(target)).keys(), saved.keys(), path)
            for key, one in items_of(target):
                self.check(one, saved[key], below(path, key))

    def check_tensor(self, own: Tensor, name: str, path: str, same_type: bool = False) -> None:
        saved = self.specs[name]
        if tuple(own.shape) != saved.shape or (same_type and own.dtype != saved.dtype):
            shapes = f"{own.dtype} {list(own.shape)} in the state, and {saved.dtype} {list(saved.shape)}"
            raise refusal(path, f"is {shapes} in the snapshot")

    @torch.no_grad()
    def fill(self, target: Any, tree: Any) -> Any:
        """Fill the objects, tensors and generators of `target`; return what takes its place. See `check`."""
        if not is_filled(target):
            return self.unpack(tree)
        if isinstance(target, (dict, list, tuple)):
            saved = self.children(tree)
            filled = {key: self.fill(one, saved[key]) for key, one in items_of(target)}
            if isinstance(target, tuple):
                return tuple(filled.values())
            for key, one in filled.items():
                target[key] = one
            return target
        found = self.unpack(tree)
        if isinstance(target, Tensor):
            target.copy_(like(target, found))
        elif isinstance(target, torch.Generator):
            target.set_state(found)
        else:
            target.load_state_dict(fitted(target, found))
        return target


def check_keys(own: Iterable[Any], saved: Iterable[Any], path: str) -> None:
    for key in [key for key in own if key not in saved]:
        raise refusal(below(path, key), "is in the state, and not in the snapshot")
    for key in [key for key in saved if key not in own]:
        raise refusal(below(path, key), "is in the snapshot, and not in the state")


def fitted(target: Any, found: Any) -> Any:
    """Return the state_dict `found` with the names that the module `target` has, and with its DTensors."""
    if isinstance(target, nn.Module):
        state = target.state_dict()
        return {name: like(state[name], found[short]) for name, short in short_names(target).items()}
    if isinstance(target, torch.optim.Optimizer):
        weights = [weight for group in target.param_groups for weight in group["params"]]
        for number, values in found["state"].items():
            for key, one in values.items():
                if isinstance(one, Tensor):
                    values[key] = like(weights[number], one)
    return found
