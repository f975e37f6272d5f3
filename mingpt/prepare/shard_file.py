"""Files of tokens in llm.c's format: 256 int32 of header (magic, version, number of tokens), then the tokens.

Magic 20240520, version 1: uint16. Magic 20240801, version 7: uint32. All little-endian.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEADER_BYTES = 1024
FORMATS = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes of a token
HEADERLESS = ("train.bin", "val.bin")  # nanoGPT's
PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class ShardInfo:
    """What a file's beginning and size say."""

    offset: int  # bytes before the first token
    dtype: np.dtype
    tokens: int


def make_header(tokens: int, dtype: np.dtype) -> bytes:
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = [*FORMATS[dtype.itemsize], tokens]
    return header.tobytes()


def read_info(path: Path) -> ShardInfo:
    """Raises ValueError with what is wrong, OSError if the file cannot be read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(HEADER_BYTES)[: size // 4 * 4][:12], dtype="<i4")
    for width, (magic, version) in FORMATS.items():
        if len(head) and head[0] == magic:
            tokens = int(head[2]) if size >= HEADER_BYTES else -1
            if tokens < 0:
                raise ValueError(f"its header is incomplete or damaged ({size:,} bytes)")
            if head[1] != version:
                raise ValueError(f"its header has version {head[1]}, not {version}")
            if size != HEADER_BYTES + width * tokens:
                raise ValueError(
                    f"it has {size:,} bytes; its header says {tokens:,} tokens, which are "
                    f"{HEADER_BYTES + width * tokens:,} bytes"
                )
            return ShardInfo(HEADER_BYTES, np.dtype(f"<u{width}"), tokens)
    if path.name not in HEADERLESS:
        found = f"begins with {head[0]}" if len(head) else f"has {size} bytes"
        raise ValueError(f"it {found}, which is no header of token shards")
    if size % 2:
        raise ValueError(f"it has {size:,} bytes, no whole number of uint16")
    return ShardInfo(0, np.dtype("<u2"), size // 2)


def read_through(path: Path, info: ShardInfo | None = None) -> tuple[str, int]:
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
