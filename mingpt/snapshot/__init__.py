"""Snapshots as files: written atomically, checked when read, in a folder, at a URL or in /dev/shm.

A snapshot exists when its manifest does and its checksums hold. saver.py decides which ones are kept. Knows
tensors by name; knows no model and no ranks.
"""

from mingpt.snapshot.claim import Claim
from mingpt.snapshot.holder import Holder
from mingpt.snapshot.lookup import names_a_snapshot, open_snapshot, read_safetensors
from mingpt.snapshot.manifest import Snapshot, read_config
from mingpt.snapshot.memory import MemorySnapshots
from mingpt.snapshot.process import Process, this_process
from mingpt.snapshot.saver import SnapshotSaver
from mingpt.snapshot.staging import StagingBuffer, to_safetensors
from mingpt.snapshot.store import SnapshotStore
from mingpt.snapshot.tensors import Check, Entries, tensor_views

__all__ = [
    "Check",
    "Claim",
    "Entries",
    "Holder",
    "MemorySnapshots",
    "Process",
    "Snapshot",
    "SnapshotSaver",
    "SnapshotStore",
    "StagingBuffer",
    "names_a_snapshot",
    "open_snapshot",
    "read_config",
    "read_safetensors",
    "tensor_views",
    "this_process",
    "to_safetensors",
]
