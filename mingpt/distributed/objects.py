"""Objects of all ranks, exchanged in one collective where they are small."""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

HEAD_BYTES, SIZE_BYTES = 1024, 8
SMALL_BYTES = HEAD_BYTES - SIZE_BYTES  # of a pickled object; what is longer takes a second collective


def gather_objects(value: Any, all_gather: Callable[["Tensor"], "Tensor"]) -> list[Any]:
    """Each rank's value, by rank. `all_gather` takes (n,) bytes of each rank to (workers, n).

    torch's all_gather_object first exchanges the sizes, and so always takes two collectives. Collective.
    """
    content = pickle.dumps(value)
    heads = all_gather(
        padded(len(content).to_bytes(SIZE_BYTES, "little") + content[:SMALL_BYTES], HEAD_BYTES)
    )
    first = [row.numpy().tobytes() for row in heads]
    sizes = [int.from_bytes(head[:SIZE_BYTES], "little") for head in first]
    rest = [b""] * len(first)
    longest = max(sizes) - SMALL_BYTES
    if longest > 0:
        rest = [row.numpy().tobytes() for row in all_gather(padded(content[SMALL_BYTES:], longest))]
    contents = (head[SIZE_BYTES:] + tail for head, tail in zip(first, rest, strict=True))
    return [pickle.loads(whole[:size]) for whole, size in zip(contents, sizes, strict=True)]


def padded(content: bytes, size: int) -> "Tensor":
    """(size,) uint8, zero after the content."""
    import torch

    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
