"""A dispatch mode that measures the memory of operations' results."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class AliveTensors(TorchDispatchMode):
    """Counts the bytes of results that operations return under this mode.

    `now_bytes` counts the results that are not yet freed; `peak_bytes` is the largest `now_bytes` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self.seen: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self.seen or not size:
            return
        self.seen.add(address)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self.remove, address, size)

    def remove(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                self.add(one)
        return result
