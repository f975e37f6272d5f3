"""Count what a process sends, and refuse operations that an exercise asks the learner to write."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorial.checks.processes import Refused

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
)


def replace(name: str, function: Callable[..., Any]) -> None:
    """Where the learner finds the function, and where PyTorch's own functions do."""
    for module in (dist, distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, function)


def refuse_collectives() -> None:
    """From now on a call of a collective raises Refused."""

    def make(name: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise Refused(f"It calls {name}; the exercise is to use only send and recv, and no collectives")

        return refuse

    for name in COLLECTIVES:
        replace(name, make(name))


@dataclass(frozen=True)
class Send:
    to: int | None
    numbers: int
    bytes: int


def count_sends() -> list[Send]:
    """A list that grows with each tensor that this process sends from now on."""
    sends: list[Send] = []
    is_inside = False  # `send` may call `isend`

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def send(tensor: Any, dst: int | None = None, *arguments: Any, **options: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return original(tensor, dst, *arguments, **options)
            to = options.get("group_dst", dst)
            sends.append(Send(to, tensor.numel(), tensor.nbytes))
            is_inside = True
            try:
                return original(tensor, dst, *arguments, **options)
            finally:
                is_inside = False

        return send

    for name in ("send", "isend"):
        replace(name, make(getattr(distributed_c10d, name)))
    return sends
