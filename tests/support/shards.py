"""Writes token shards in the formats that nanoGPT and llm.c have published."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_nanogpt(path: Path, tokens: Sequence[int] | np.ndarray) -> None:
    np.asarray(tokens).astype("<u2").tofile(path)


def llmc_header(count: int, *, wide: bool = False) -> bytes:
    """The header has 256 int32: magic, version, number of tokens, then zeros. `wide` is for uint32 tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240801, 7, count) if wide else (20240520, 1, count)
    return header.tobytes()


def write_llmc(path: Path, tokens: Sequence[int] | np.ndarray, wide: bool = False) -> None:
    array = np.asarray(tokens).astype("<u4" if wide else "<u2")
    path.write_bytes(llmc_header(len(array), wide=wide) + array.tobytes())
