"""Count the bytes that a process sends by collectives, and those of the tensors that it keeps."""

import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tutorial.checks.collectives import Collectives
from tutorial.checks.processes import Refused


class CountedCollectives(Collectives):
    """Adds up the bytes that go around the ring: all of a tensor, and for an all-reduce twice that.

    Each of W ranks sends (W - 1) / W of them, by the tutorial's rule.
    """

    bytes = 0

    def record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature, call, name = inspect.signature(original), super().record(original), original.__name__

        def count(*arguments: Any, **options: Any) -> Any:
            if not self.is_inside:
                if "object" in name:
                    raise Refused(f"It calls {name}, whose bytes are not counted; send tensors instead")
                given = signature.bind(*arguments, **options).arguments.values()
                lists = [value if isinstance(value, list) else [value] for value in given]
                whole = max(sum(part.nbytes for part in parts if isinstance(part, Tensor)) for parts in lists)
                self.bytes += whole * (2 if name == "all_reduce" else 1)
            return call(*arguments, **options)

        return count


def kept_bytes(weights: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes of all tensors made after `gc.freeze`, except these; and the bytes that only a view keeps."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    sizes, used = dict[int, int](), dict[int, int]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        used[storage.data_ptr()] = max(tensor.nbytes, used.get(storage.data_ptr(), 0))
    for weight in weights:
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return sum(sizes.values()), sum(size - used[address] for address, size in sizes.items())
