"""What depends on the positions alone and is shared by all blocks: the causal mask and rotary tables.

The tables are computed on the CPU and copied, so that they have the same bits on every device.
"""

import torch
from torch import Tensor, nn

ROTARY_BASE = 10_000.0


class Rotary(nn.Module):
    """Rotary position embedding: rotate pairs of features by angles proportional to the position."""

    def __init__(self, head_size: int, block_size: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(block_size, -(-head_size // 2)), persistent=False)
        self.register_buffer("sin", torch.empty(block_size, -(-head_size // 2)), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.head_size = head_size
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the tables; on the meta device there is nothing to compute."""
        if self.cos.is_meta:
            return
        with torch.device("cpu"):
            frequencies = ROTARY_BASE ** (-torch.arange(0, self.head_size, 2) / self.head_size)
            angles = torch.outer(torch.arange(len(self.cos)).float(), frequencies)  # (T, D / 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int) -> Tensor:
        """(B, H, T, D) features of positions start, start + 1, ..., rotated."""
        end = start + x.size(2)
        cos, sin = (table[start:end].to(x.dtype) for table in (self.cos, self.sin))  # (T, D / 2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Positions(nn.Module):
    """`mask` is (T, T), minus infinity above the diagonal; `rotary` is None where positions are learned."""

    def __init__(self, rotary: Rotary | None, block_size: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.register_buffer("mask", torch.empty(block_size, block_size), persistent=False)
        self.mask: Tensor
        self.init_mask()

    def init_mask(self) -> None:
        if not self.mask.is_meta:
            self.mask.fill_(float("-inf")).triu_(1)

    def init_buffers(self) -> None:
        """Compute everything again, after Module.to_empty."""
        self.init_mask()
        if self.rotary:
            self.rotary.init_buffers()
