"""Exercise 4: write a snapshot that is valid whenever the process is killed. The problem: 4_snapshot.md

python -m tutorial.check 4
"""

from pathlib import Path


def save(path: Path, data: bytes) -> None:
    """Write a snapshot, of which there may be an older one at `path`.

    Whenever the process is killed, `path` is the whole old snapshot or the whole new one. When `save` has
    returned, the new one survives a power cut. Another process may save another `path` in the same folder at
    the same time. What a killed process has left must not disturb the next `save`. After a `save` without
    a kill no other file is left. Files are written by `open`, `os.open` or `tempfile`.
    """
    raise NotImplementedError("save")
