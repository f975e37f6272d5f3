"""Write and read snapshots, the saved states of a run: files in a folder, at a URL or in /dev/shm.

A snapshot is tensor files and a manifest, a JSON file that describes them. It exists when its manifest exists
and the manifest's checksums hold. SnapshotSaver (saver.py) deletes old snapshots. No module here depends on
the model: tensors are known by their names, and by the rows that each rank holds.
"""

from mingpt.snapshot.layout import TensorSpec, specs_of
from mingpt.snapshot.lookup import open_snapshot
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
    "specs_of",
    "this_process",
]
