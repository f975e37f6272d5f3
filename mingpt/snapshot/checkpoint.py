"""Save and load the state of a user's own training loop, in the file format of this package's snapshots."""

import atexit
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import reason_of
from mingpt.base.processes import this_process
from mingpt.base.urls import open_url
from mingpt.distributed.group import BackgroundGroup
from mingpt.snapshot.claim import Claim, Holder
from mingpt.snapshot.layout import TensorSpec, memory_of, specs_of
from mingpt.snapshot.manifest import Manifest
from mingpt.snapshot.reading import Entries
from mingpt.snapshot.saver import Saver, Tier
from mingpt.snapshot.store import Snapshot, Store
from mingpt.snapshot.tree import Packer, check, fill, parse

TREE = "tree"  # the tensor that has the bytes of a state's JSON
MIN_TREE_BYTES = 4096
log = logging.getLogger(__name__)


class Checkpoint:
    """Saves and loads the state of a training loop in the folder or at the fsspec URL `where`.

    A state is a dict of objects with `state_dict` and `load_state_dict`, tensors, torch.Generators, bools,
    ints, floats, strings, None, and lists, tuples and dicts of these. The `keep` snapshots of the highest
    steps stay. If torch.distributed is initialised, all ranks construct a Checkpoint and call its methods
    together: rank 0 writes, and all ranks load the same snapshot. The constructor raises ValueError if `keep`
    is below 1, and UserError if no driver for the URL is installed. A driver that connects at once may raise
    its own errors.
    """

    def __init__(self, where: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one snapshot must stay")
        self.group = BackgroundGroup.of_all()
        agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        holder = Holder((this_process(agent),), uuid.uuid4().hex, uuid.uuid4().hex, since=time.time())
        _, folder = open_url(str(where), f"snapshot.path {where}")
        self.claim = Claim(Path(folder), holder, what="")
        self.tier = Tier("disk", Store(str(where), check_claim=self.claim.check), keep=keep)
        self.saver = Saver([self.tier])
        self.snapshot: Snapshot | None = None  # the one that was loaded, on rank 0
        self.left_out: dict[int, Exception] = {}  # {step: why its snapshot cannot be used}
        self.specs: dict[str, TensorSpec] | None = None  # of the newest save

    def load(self, state: dict[str, Any]) -> int | None:
        """Fill `state` from the newest valid snapshot; return its step, or None if there is no snapshot.

        Objects, tensors and generators, also inside lists, tuples and dicts, are filled in place, and plain
        values are replaced. A damaged or unreadable snapshot is left out with a log line. Raises UserError,
        and changes nothing, if the snapshot does not fit: its keys, except in inner dicts of plain values,
        and the types and shapes of its tensors and its modules' tensors must be those of `state`. Also raises
        UserError if all snapshots are left out, or if one that is tried is a run's or has an unknown schema
        version. Raises UnreadableSnapshot if the folder cannot be listed. If a tensor cannot be read, raises
        UnreadableSnapshot or CorruptSnapshot. After such an error, or one of loading an object (as by
        `load_state_dict`), `state` may be partly filled. Collective.
        """
        found = self.group.on_rank(0, self.find)
        if found is None:
            return None
        step, text, specs = found
        saved = parse(json.loads(text))
        self.group.on_all(lambda: check(dict(state), saved, specs))
        state.update(fill(dict(state), saved, partial(self.read, specs)))
        self.tier.begun = int(step)
        return self.tier.begun

    def find(self) -> tuple[int, str, Entries] | None:
        store, self.left_out = self.tier.store, {}
        self.saver.wait()
        for step in store.possible_steps():
            try:
                snapshot = store.read(step, check_is_of_loop)
                text = read_tree(snapshot)
            except (CorruptSnapshot, UnreadableSnapshot) as error:
                log.warning(f"the snapshot of step {step} in {store.url} is left out: {error}")
                self.left_out[step] = error
            else:
                self.snapshot = snapshot
                return step, text, snapshot.entries
        if self.left_out:
            step, problem = next(iter(self.left_out.items()))
            raise UserError(
                f"no snapshot in {store.url} can be used (step {step}: {problem}): begin in another folder"
            )
        return None

    def read(self, specs: Entries, name: str) -> Tensor:
        """Return tensor `name`, described by `specs`, from the snapshot that `find` opened. Collective."""
        tensor = torch.empty(specs[name].shape, dtype=specs[name].dtype, device="cpu")

        def work() -> None:
            if self.snapshot:
                tensor.copy_(self.snapshot.read(name))

        self.group.on_rank(0, work)
        if self.group.world_size > 1:
            distributed.broadcast(tensor.view(-1).view(torch.uint8), 0, group=self.group.process_group)
        return tensor

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy `state`, and write the copy in the background as the snapshot of `step`, an int of at least 0.

        Waits for the previous write. If a write fails, `wait` raises its error, unless a later write has
        succeeded. A snapshot of the same step is overwritten, and is not valid meanwhile if the state has
        changed. Raises the errors of `state_dict`, and UserError for a value that cannot be stored, with its
        place in `state`, for too many tensors, and for a step before the newest. In a local folder, raises
        ClaimLost if another job has taken the folder over, or if this job's claim-*.json there was removed.
        The first call also raises UserError if another job uses the local folder, or if there is a snapshot
        newer than the loaded one (any, if none was loaded) that `load` has not found damaged or unreadable.
        If the folder or URL cannot be listed or written to, the first call raises UserError, OSError or an
        error of fsspec's driver. Collective.
        """
        packer = Packer(taken=TREE, is_writer=self.group.rank == 0)
        tree = packer.pack(dict(state))
        self.group.on_rank(0, lambda: self.copy(step, json.dumps(tree).encode(), packer.tensors))

    def copy(self, step: int, text: bytes, tensors: dict[str, Tensor]) -> None:
        if self.specs is None:
            self.prepare()
        if step < self.tier.begun:
            newest = f"{self.tier.store.url} has a snapshot of step {self.tier.begun}"
            raise UserError(f"{newest}, and step {step} is before it: save only later steps there")
        self.claim.check()  # the thread that writes does not report a lost claim
        size = max(MIN_TREE_BYTES, 1 << (len(text) - 1).bit_length())  # changes seldom, so the buffer stays
        tensors[TREE] = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        specs = specs_of(tensors)
        if specs != self.specs:
            self.saver.wait()
            self.saver, self.specs = Saver([self.tier]), specs
        self.saver.save(Manifest.model_validate({"step": step, "windows": step}), tensors)

    def prepare(self) -> None:
        """Claim the folder, if it is local, and rename the damaged snapshots that `find` has left out.

        Raises UserError if there is a newer snapshot than the loaded one, except those that were left out.
        Raises the errors of `Claim.acquire`, `Store.steps`, `Store.prepare` and `Store.quarantine`.
        """
        store = self.tier.store
        if store.is_local:
            os.makedirs(store.root, exist_ok=True)
            self.claim.acquire()
            atexit.register(self.claim.release)
        newest = max({-1, *store.steps()} - {*self.left_out})
        if newest > self.tier.begun:
            raise UserError(
                f"{store.url} holds a snapshot of step {newest}, from which this loop does not go on: load "
                "it, or save in another folder"
            )
        store.prepare()
        for step, error in self.left_out.items():
            if isinstance(error, CorruptSnapshot):
                store.quarantine(step, str(error))
            else:
                store.unreadable.add(step)

    def wait(self) -> None:
        """Wait until the last snapshot is written. Raises the error of the last write, if any. Collective."""
        self.group.on_rank(0, self.finish)

    def finish(self) -> None:
        self.saver.wait()
        if self.tier.error:
            raise self.tier.error


def read_tree(snapshot: Snapshot) -> str:
    """Return the JSON of the snapshot's state. Raises CorruptSnapshot or UnreadableSnapshot."""
    try:
        text = memory_of(snapshot.read(TREE)).tobytes().decode()
        parse(json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSnapshot(f"its tree is damaged: {reason_of(error)}") from None
    return text


def check_is_of_loop(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
    if TREE not in entries:
        raise UserError("the folder holds snapshots of a run, or of another program: choose another folder")
