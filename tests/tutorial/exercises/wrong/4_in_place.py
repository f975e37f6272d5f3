# The checker says: write\(snapshot, 300,000 bytes\): .*150,000 of 300,000 .*mistakes/only_snapshot\.py
import os
from pathlib import Path


def save(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
