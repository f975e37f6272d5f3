# The checker says: another one saved snapshot\.1 in the same folder\. Do they use the same temporary file
import os
from pathlib import Path


def save(path: Path, data: bytes) -> None:
    unfinished = path.with_name("snapshot.tmp")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
