"""A snapshot that is open for reading: its manifest, and where its tensors lie."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from mingpt.config import Config
from mingpt.errors import CorruptSnapshot
from mingpt.snapshot.layout import OPTIMIZER
from mingpt.snapshot.manifest import read_config
from mingpt.snapshot.reading import ContentFile
from mingpt.snapshot.tensors import TensorEntry, TensorFile


class Snapshot:
    """Reads tensors, or rows of them, from the files of a snapshot when they are asked for, and never more.

    Raises CorruptSnapshot if a tensor is in two files; reading raises UnreadableSnapshot or CorruptSnapshot.
    """

    def __init__(self, manifest: dict[str, Any], files: Sequence[TensorFile]) -> None:
        self.manifest, self.files = manifest, list(files)
        self.file_of: dict[str, TensorFile] = {}
        for file in files:
            for name in file.entries:
                if name in self.file_of:
                    raise CorruptSnapshot(f"its tensor {name[:100]!r} is in two files")
                self.file_of[name] = file

    @classmethod
    def from_content(cls, manifest: dict[str, Any], content: bytes | memoryview) -> "Snapshot":
        """One whose tensors lie in memory, as the bytes of a safetensors file."""
        return cls(manifest, [TensorFile(ContentFile(content))])

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Type, shape and place of each tensor."""
        return {name: file.entries[name] for name, file in self.file_of.items()}

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return read_config(self.manifest)

    def holds_weights(self, file: TensorFile) -> bool:
        """Whether there is more than optimizer state in a file."""
        return any(not name.startswith(OPTIMIZER) for name in file.entries)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """A tensor, or its rows `begin` to before `end` (of dimension 0). KeyError if there is none."""
        return self.file_of[name].read(name, begin, end)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        return {
            name.removeprefix(prefix): self.read(name) for name in self.file_of if name.startswith(prefix)
        }

    def chunks(self, name: str, max_bytes: int) -> Iterator[tuple[int, int, Tensor]]:
        """A tensor's rows in turn: (begin, end, rows), at most `max_bytes` at once, but at least one row.

        A tensor without dimensions is one row.
        """
        entry = self.file_of[name].entries[name]
        if not entry.shape:
            yield 0, 1, self.read(name)
            return
        rows = entry.shape[0]
        row_bytes = (entry.end - entry.begin) // max(1, rows)
        step = max(1, max_bytes // max(1, row_bytes))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield begin, end, self.read(name, begin, end)
