"""Snapshots as files: written atomically, checked when read, in a folder, at a URL or in /dev/shm.

A snapshot exists when its manifest does and its checksums hold. saver.py decides which ones are kept. Knows
tensors by name; knows no model and no ranks.
"""

from mingpt.snapshot.claim import Claim
from mingpt.snapshot.handle import Snapshot
from mingpt.snapshot.holder import Holder
from mingpt.snapshot.layout import PART_BYTES, FileLayout, TensorSpec, make_layout, specs_of
from mingpt.snapshot.lookup import names_a_snapshot, open_snapshot, read_safetensors
from mingpt.snapshot.manifest import FileRecord, read_config
from mingpt.snapshot.memory import MemorySnapshots
from mingpt.snapshot.process import Process, this_process
from mingpt.snapshot.saver import LocalTransfer, SnapshotSaver, Transfer, write_snapshot
from mingpt.snapshot.staging import LocalChunks, StagingBuffer, to_safetensors
from mingpt.snapshot.store import SnapshotStore
from mingpt.snapshot.tensors import Check, Entries

__all__ = [
    "PART_BYTES",
    "Check",
    "Claim",
    "Entries",
    "FileLayout",
    "FileRecord",
    "Holder",
    "LocalChunks",
    "LocalTransfer",
    "MemorySnapshots",
    "Process",
    "Snapshot",
    "SnapshotSaver",
    "SnapshotStore",
    "StagingBuffer",
    "TensorSpec",
    "Transfer",
    "make_layout",
    "names_a_snapshot",
    "open_snapshot",
    "read_config",
    "read_safetensors",
    "specs_of",
    "this_process",
    "to_safetensors",
    "write_snapshot",
]
