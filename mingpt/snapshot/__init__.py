"""Snapshots, the checkpoints of a training loop: files in a folder, at a URL or in a node's memory.

A snapshot consists of tensor files, the tokenizer's file if there is a tokenizer, and a manifest, a JSON file
that lists the other files. A snapshot is valid if its manifest exists and the checks of `Store.read` succeed.
Saver (saver.py) writes snapshots to one or several places (a Tier each), and removes old snapshots. search.py
chooses the newest valid snapshot that a run may use, the same for all of its ranks. The file
mingpt/training/contents.py says which tensors a run's snapshot must have.
"""

from mingpt.snapshot.checkpoint import Checkpoint
from mingpt.snapshot.lookup import open_snapshot
from mingpt.snapshot.manifest import Manifest, TokenizerFields
from mingpt.snapshot.memory import MemoryFolder
from mingpt.snapshot.reading import Check, Entries
from mingpt.snapshot.saver import Saver, Status, Tier
from mingpt.snapshot.search import Found, Offer, Reader, StoredState, find_valid
from mingpt.snapshot.store import Snapshot, Store

__all__ = [
    "Check",
    "Checkpoint",
    "Entries",
    "Found",
    "Manifest",
    "MemoryFolder",
    "Offer",
    "Reader",
    "Saver",
    "Snapshot",
    "Status",
    "Store",
    "StoredState",
    "Tier",
    "TokenizerFields",
    "find_valid",
    "open_snapshot",
]
