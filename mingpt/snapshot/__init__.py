"""Write and read snapshots, the saved states of a run: files in a folder, at a URL or in /dev/shm.

A snapshot exists when its manifest, a JSON file that lists the others, exists and its checksums hold.
saver.py decides which snapshots are kept. This package knows tensors by name, and the rows of them that each
rank holds, but no model.
"""

from mingpt.snapshot.layout import TensorSpec, specs_of
from mingpt.snapshot.lookup import open_snapshot, read_safetensors
from mingpt.snapshot.manifest import read_config
from mingpt.snapshot.memory import MemorySaver, MemorySnapshots
from mingpt.snapshot.reading import Check, Entries
from mingpt.snapshot.saver import Sharding, SnapshotSaver
from mingpt.snapshot.slots import Process, this_process
from mingpt.snapshot.store import Snapshot, SnapshotStore

__all__ = [
    "Check",
    "Entries",
    "MemorySaver",
    "MemorySnapshots",
    "Process",
    "Sharding",
    "Snapshot",
    "SnapshotSaver",
    "SnapshotStore",
    "TensorSpec",
    "open_snapshot",
    "read_config",
    "read_safetensors",
    "specs_of",
    "this_process",
]
