"""Writes the header of a file of tokens in llm.c's format, and reads a file through."""

import hashlib
from pathlib import Path

import numpy as np

from mingpt.data.shard_files import FORMATS, HEADER_BYTES, ShardFile

PIECE_BYTES = 8 << 20


def make_header(tokens: int, dtype: np.dtype) -> bytes:
    magic, version = next((magic, version) for magic, (version, kind) in FORMATS.items() if kind == dtype)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = [magic, version, tokens]
    return header.tobytes()


def read_through(path: Path, info: ShardFile | None = None) -> tuple[str, int]:
    """sha256 of the whole file, and the largest of its tokens (-1 without `info`, or for none)."""
    digest, largest = hashlib.sha256(), -1
    with open(path, "rb") as file:
        if info:
            digest.update(file.read(info.offset))
        while content := file.read(PIECE_BYTES):
            digest.update(content)
            if info:
                whole = len(content) // info.dtype.itemsize * info.dtype.itemsize
                largest = max(largest, int(np.frombuffer(content[:whole], dtype=info.dtype).max(initial=0)))
    return digest.hexdigest(), largest
