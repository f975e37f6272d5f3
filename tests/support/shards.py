"""Token shards as nanoGPT and llm.c write them, made from the formats that both publish."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_nanogpt(path: Path, tokens: Sequence[int] | np.ndarray) -> None:
    """Write little-endian uint16 and nothing else, as nanoGPT's prepare.py writes train.bin and val.bin."""
    np.asarray(tokens).astype("<u2").tofile(path)


def llmc_header(count: int, *, wide: bool = False) -> bytes:
    """256 int32: magic, version, number of tokens, then zeros, as llm.c's write_datafile writes them."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240801, 7, count) if wide else (20240520, 1, count)
    return header.tobytes()


def write_llmc(path: Path, tokens: Sequence[int] | np.ndarray, wide: bool = False) -> None:
    """Write llm.c's shard: its header, then uint16 tokens; `wide`: uint32 tokens, as for Llama 3."""
    array = np.asarray(tokens).astype("<u4" if wide else "<u2")
    path.write_bytes(llmc_header(len(array), wide=wide) + array.tobytes())
