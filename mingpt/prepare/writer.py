"""Tokens to shards: full ones, then a shorter last one, first of the training part, then of validation."""

import contextlib
import io
import os
from dataclasses import asdict
from typing import Any

import numpy as np

from mingpt.data.shard_files import HEADER_BYTES
from mingpt.prepare.batches import Batch, Position
from mingpt.prepare.encoding import Encoder
from mingpt.prepare.folder import PARTIAL, Record, give_name, writable
from mingpt.prepare.shard_file import make_header, read_through


class ShardWriter:
    """Writes batches in their order. After each shard the record says from where to go on.

    `position` is where reading must begin; the tokens that lie in finished shards already are dropped.
    """

    def __init__(self, record: Record, encoder: Encoder, shard_tokens: int) -> None:
        self.record, self.encoder, self.shard_tokens = record, encoder, shard_tokens
        nothing = {"position": {}, "skip": 0, "part": "train"}
        last: dict[str, Any] = record.shards[-1] if record.shards else nothing
        self.position = Position(**last["position"])
        self._skip: int = last["skip"]
        self._part: str = last["part"]
        self._file: io.FileIO | None = None
        self._count = 0  # tokens in the shard at hand

    def write(self, batch: Batch, tokens: np.ndarray) -> None:
        """Append the tokens of the next batch. Raises UserError if they cannot be written."""
        if batch.is_val and self._part == "train":
            self._finish_shard(batch.before, 0)
            self._part = "val"
            start = batch.before.start + batch.before.bytes
            self.record.val = {"document": batch.before.document, "start": start}
        if self.record.val is not None and "first_token" not in self.record.val and len(tokens):
            text = next((text for text in batch.texts if text), "")
            self.record.val["first_token"] = self.encoder.first_token_bytes(text, int(tokens[0]))
        done = min(self._skip, len(tokens))
        self._skip -= done
        while done < len(tokens):
            part = tokens[done : done + self.shard_tokens - self._count]
            self._append(part)
            done += len(part)
            if self._count == self.shard_tokens:
                self._finish_shard(batch.before, done)
        self.position = batch.after

    def close(self) -> None:
        """The last shard. Raises UserError."""
        self._finish_shard(self.position, 0)

    def abandon(self) -> None:
        """Give the room of an unfinished shard back, which may be what the disk lacks."""
        if self._file:
            with contextlib.suppress(OSError):
                os.unlink(self._file.name)
            with contextlib.suppress(OSError):
                self._file.close()

    def _name(self) -> str:
        number = sum(shard["part"] == self._part for shard in self.record.shards)
        return f"{self._part}_{number:05d}.bin"

    def _append(self, tokens: np.ndarray) -> None:
        path = self.record.folder / (self._name() + PARTIAL)
        with writable(path):
            if self._file is None:
                self._file = io.FileIO(path, "wb")
                self._write_all(bytes(HEADER_BYTES))  # the real one follows when all is there
            self._write_all(tokens.tobytes())
        self._count += len(tokens)

    def _write_all(self, content: bytes) -> None:
        assert self._file
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def _finish_shard(self, position: Position, skip: int) -> None:
        """Name the shard. Going on begins at `position`, without the first `skip` tokens from there."""
        if self._file is None:
            return
        name = self._name()
        path = self.record.folder / name
        partial = path.with_name(name + PARTIAL)
        with writable(path):
            self._file.seek(0)
            self._write_all(make_header(self._count, self.encoder.dtype))
            os.fsync(self._file.fileno())
            self._file.close()
            digest, _ = read_through(partial)
            give_name(partial, path)
            size = path.stat().st_size
        shard = {"name": name, "tokens": self._count, "bytes": size, "sha256": digest}
        self._file, self._count = None, 0
        self.record.shards.append({**shard, "part": self._part, "position": asdict(position), "skip": skip})
        self.record.save()
