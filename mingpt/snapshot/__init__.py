"""Snapshots as files: written atomically, checked when read, in a folder, at a URL or in /dev/shm.

A snapshot exists when its manifest does and its checksums hold. saver.py decides which ones are kept. Knows
tensors by name; knows no model and no ranks.
"""

from mingpt.snapshot.manifest import Snapshot
from mingpt.snapshot.memory import MemorySnapshots
from mingpt.snapshot.saver import SnapshotSaver
from mingpt.snapshot.staging import StagingBuffer, to_safetensors
from mingpt.snapshot.store import SnapshotStore, open_snapshot

__all__ = ["MemorySnapshots", "Snapshot", "SnapshotSaver", "SnapshotStore", "StagingBuffer", "open_snapshot",
           "to_safetensors"]  # fmt: skip
