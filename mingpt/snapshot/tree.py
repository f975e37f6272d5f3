"""Turn a training state into JSON and named tensors, and load it into a loop's objects, without pickle.

A state is a dict of objects with `state_dict` and `load_state_dict`, torch.Generators, tensors, plain values
(bools, ints, floats, strings, None), and lists, tuples and dicts of all these. In the JSON, a list stands for
a list, and {KIND: CONTENT}, such as {"tensor": NAME}, for a value of any other kind that is not plain.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mingpt.base.errors import UserError
from mingpt.snapshot.layout import DTYPE_NAMES, TensorSpec

DICTS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
PLAIN = (bool, int, float, str, type(None))
KNOWN = (*PLAIN, list, tuple, *DICTS.values())


class Saved(NamedTuple):
    """A saved tensor, generator or object with a state_dict: `kind` is "tensor", "generator" or "state"."""

    kind: str
    content: Any  # the name of a tensor, or the saved state_dict


def is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # whose import takes as long as the start of a run
    return module is not None and isinstance(tensor, module.DTensor)


def kind_of(value: Any) -> str:
    """Return "tensor", "generator", "state" (`value` has state_dict), a Saved's kind, or the type's name."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, torch.Generator):
        return "generator"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "state"
    if isinstance(value, Saved):
        return value.kind
    kind = type(value)
    return kind.__name__ if kind in KNOWN else f"{kind.__module__}.{kind.__qualname__}"


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return [(key or index, element)] if the type is dict, OrderedDict, Counter, list or tuple, else []."""
    if type(value) in DICTS.values():
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else []


def is_filled(value: Any) -> bool:
    """Return whether `value` is or contains a tensor, a generator or an object that loads a state_dict."""
    is_own = kind_of(value) in ("tensor", "generator", "state")
    return is_own or any(is_filled(one) for _, one in items_of(value) if type(one) not in PLAIN)


def state_of(value: Any) -> Any:
    """Return `value.state_dict()`; a module's if possible without what DDP and torch.compile add to names."""
    state = value.state_dict()
    if not isinstance(value, nn.Module):
        return state
    names = [name.replace("_orig_mod.", "") for name in state]
    # torch's AveragedModel, too, wraps a module, and adds n_averaged.
    while {True} == {name.startswith("module.") for name in names if name != "n_averaged"}:
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names, state.values(), strict=True)) if len({*names}) == len(state) else state


def refusal(path: str, reason: str) -> UserError:
    return UserError(f"{path.removeprefix('.') or 'the state'} {reason}")


class Packer:
    """Turns states into JSON, and collects their tensors in `tensors`, by names made of paths in a state.

    No tensor gets the name `taken`. If `is_writer` is false, DTensors are gathered, but nothing is collected.
    """

    def __init__(self, taken: str, is_writer: bool) -> None:
        self.is_writer = is_writer
        self.tensors: dict[str, Tensor] = {taken: torch.empty(0)}
        self.names: dict[object, str] = {}  # by the memory of a tensor
        self.alive: list[Tensor] = []  # so that no other tensor gets this memory meanwhile

    def pack(self, value: Any, path: str = "") -> Any:
        """Return `value`, at `path` in the state, for `json.dumps`. Collective if `value` contains DTensors.

        Raises UserError, with the path, if no snapshot can hold a value, and the errors of `state_dict`.
        """
        kind = kind_of(value)
        if kind == "tensor":
            return {kind: self.add(value, path)}
        if kind == "generator":
            return {kind: self.add(value.get_state(), path)}
        if kind == "state":
            return {kind: self.pack(state_of(value), path)}
        items = [
            (key, one if type(one) in PLAIN else self.pack(one, f"{path}.{key}"))
            for key, one in items_of(value)
        ]
        if type(value) in DICTS.values():
            return {kind: [[self.pack(key, f"{path}.{key}"), one] for key, one in items]}
        if type(value) in (list, tuple):
            return [one for _, one in items] if kind == "list" else {kind: [one for _, one in items]}
        if type(value) not in PLAIN:
            raise refusal(path, f"is a {kind}, which no snapshot can hold")
        return value

    def add(self, tensor: Any, path: str) -> str:
        """Add a tensor, unless the same view of its memory was added before; return the name in `tensors`.

        Raises UserError for a tensor that no snapshot can hold. Collective for a DTensor.
        """
        own = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        if (
            type(own) is not Tensor
            or own.layout != torch.strided
            or own.dtype not in DTYPE_NAMES
            or own.is_meta
        ):
            raise refusal(path, f"is a {own.layout} tensor of {own.dtype}, which no snapshot can hold")
        memory = own.untyped_storage().data_ptr(), own.storage_offset(), own.shape, own.stride(), own.dtype
        key = (*memory, own.is_conj(), own.is_neg()) if own.numel() else path
        self.alive.append(own)
        # All ranks gather a DTensor, even one that a rank has added before: other ranks may not know it.
        whole = tensor.full_tensor().cpu() if is_dtensor(tensor) else own
        if key not in self.names:
            name = path.removeprefix(".")
            while name in self.tensors:
                name += "'"
            if self.is_writer:
                self.tensors[name] = whole.resolve_conj().resolve_neg()
            self.names[key] = name
        return self.names[key]


def parse(content: Any) -> Any:
    """Return the state in `content`, parsed JSON, with a Saved for each tensor, generator or state_dict."""
    if isinstance(content, list):
        return [parse(one) for one in content]
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind in DICTS:
        return DICTS[kind]({parse(key): parse(one) for key, one in inner})
    return tuple(map(parse, inner)) if kind == "tuple" else Saved(kind, parse(inner))


def check(target: Any, saved: Any, specs: Mapping[str, TensorSpec], path: str = "") -> None:
    """Raise UserError, which names the place, if `saved`, a result of `parse`, does not fit `target`.

    `path` is the place of `target` in the state, and `specs` has the types and shapes of saved tensors. Kinds
    of values, tensors' types and shapes, and keys of modules and containers are compared. Inside the state,
    values for which `is_filled` is false are not compared, nor are state_dicts of objects except modules.
    """
    kind = kind_of(target)
    if path and not is_filled(target):
        return
    if kind != kind_of(saved):
        raise refusal(path, f"is a {kind} in the state, and a {kind_of(saved)} in the snapshot")
    if kind == "tensor":
        spec = specs[saved.content]
        if (target.dtype, tuple(target.shape)) != (spec.dtype, spec.shape):
            own, other = f"{target.dtype} {list(target.shape)}", f"{spec.dtype} {list(spec.shape)}"
            raise refusal(path, f"is {own} in the state, and {other} in the snapshot")
    if isinstance(target, nn.Module):
        target, saved = state_of(target), saved.content
    elif kind == "state":
        return
    here, there = dict(items_of(target)), dict(items_of(saved))
    for key in [*here, *there]:
        if key not in here or key not in there:
            raise refusal(f"{path}.{key}", f"is only in the {'state' if key in here else 'snapshot'}")
        check(here[key], there[key], specs, f"{path}.{key}")


@torch.no_grad()
def fill(target: Any, saved: Any, read: Callable[[str], Tensor]) -> Any:
    """Load `saved`, which `check` has accepted, into `target`; return what replaces `target`.

    Tensors, generators, objects with a state_dict, and dicts and lists with these are filled in place. Other
    values are replaced. `read(name)` returns a saved tensor. Raises the errors of `read` and of loading.
    """
    kind = kind_of(target)
    if not is_filled(target):
        return unpack(saved, read)
    if kind == "tensor":
        target.copy_(like(target, read(saved.content)))
    elif kind == "generator":
        target.set_state(read(saved.content))
    elif kind == "state":
        target.load_state_dict(fitted(target, unpack(saved.content, read)))
    elif kind == "tuple":
        return tuple(fill(one, saved[key], read) for key, one in items_of(target))
    else:
        for key, one in items_of(saved):  # in one order on all ranks, which read together
            target[key] = fill(target[key], one, read)
    return target


def unpack(saved: Any, read: Callable[[str], Tensor]) -> Any:
    """Return `saved` with each Saved among its values replaced by a tensor, `read(name)`, or a state_dict."""
    if isinstance(saved, Saved):
        return unpack(saved.content, read) if kind_of(saved) == "state" else read(saved.content)
    values = [unpack(one, read) for _, one in items_of(saved)]
    if type(saved) in DICTS.values():
        return type(saved)(dict(zip(saved, values, strict=True)))
    return type(saved)(values) if type(saved) in (list, tuple) else saved


def like(own: Any, whole: Tensor) -> Tensor:
    """Return `whole`, or if `own` is a DTensor of the same shape, a DTensor with its mesh and placements."""
    if not is_dtensor(own) or own.shape != whole.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Each rank has the whole tensor already.
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def fitted(target: Any, state: Any) -> Any:
    """Return `state`, a saved state_dict, as `target.load_state_dict` takes it.

    A module gets its own names, and DTensors for its DTensors. An optimizer gets DTensors for state
    tensors with the shape of their parameter, if this is a DTensor; `state` itself is then changed.
    """
    if isinstance(target, nn.Module):
        whole = target.state_dict()  # it has the versions of modules, too
        names = zip(whole, state_of(target), strict=True)
        whole.update({name: like(whole[name], state[short]) for name, short in names})
        return whole
    if isinstance(target, torch.optim.Optimizer):
        weights = [weight for group in target.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            values = state["state"].get(number, {})
            tensors = {key: one for key, one in values.items() if isinstance(one, Tensor)}
            values |= {key: like(weight, one) for key, one in tensors.items()}
    return state
