"""Snapshots, the saved states of a run, as files in a folder, at a URL or in /dev/shm.

A snapshot consists of tensor files, the tokenizer's file if there is a tokenizer, and a manifest, a JSON file
that lists the other files. A snapshot is valid if its manifest exists and the checks of `SnapshotStore.read`
succeed. SnapshotSaver (saver.py) writes snapshots and deletes old ones. search.py chooses the same newest
snapshot for all ranks. claim.py lets only one job at a time write to a run folder. Only contents.py knows
which tensors a model has.
"""

from mingpt.snapshot.lookup import open_snapshot
from mingpt.snapshot.manifest import Manifest, TokenizerFields
from mingpt.snapshot.memory import MemorySaver, MemorySnapshots
from mingpt.snapshot.reading import Check, Entries
from mingpt.snapshot.saver import Keep, SnapshotSaver
from mingpt.snapshot.search import Found, StoredState, find_latest, load_latest
from mingpt.snapshot.store import Snapshot, SnapshotStore

__all__ = [
    "Check",
    "Entries",
    "Found",
    "Keep",
    "Manifest",
    "MemorySaver",
    "MemorySnapshots",
    "Snapshot",
    "SnapshotSaver",
    "SnapshotStore",
    "StoredState",
    "TokenizerFields",
    "find_latest",
    "load_latest",
    "open_snapshot",
]
