"""Parameters in buckets, each of which is one collective, and the memory that they take."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# As DistributedDataParallel's: a collective of less waits for its start more than for its bytes.
BUCKET_BYTES = 25 << 20


def make_buckets(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of parameters in the likely order of a backward pass.

    A bucket is closed once it holds BUCKET_BYTES, so that a large weight takes small ones with it.
    """
    buckets: list[list[int]] = [[]]
    size = 0
    for number in reversed(range(len(parameters))):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += parameters[number].nbytes
    return buckets


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device uninitialised memory; what is shared stays shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight.is_meta:
                if weight not in made:
                    made[weight] = nn.Parameter(empty_like(weight, device))
                setattr(module, name, made[weight])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                if buffer not in made:
                    made[buffer] = empty_like(buffer, device)
                setattr(module, name, made[buffer])


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """torch.empty_like, which imports sympy for a tensor on the meta device: a fifth of the time of torch."""
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)  # FSDP2's, which knows more than its shape
