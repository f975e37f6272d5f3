# The checker says: Killed at call 5, rename\(snapshot.*there is no snapshot\. os\.replace removes the old
import os
from pathlib import Path


def save(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
    os.rename(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
