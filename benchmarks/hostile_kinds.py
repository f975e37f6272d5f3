"""Snapshots that no run has written, by kind, for hostile.py. Each kind changes a valid snapshot.

No torch is imported here, because a child's peak memory begins with its parent's.
"""

import functools
import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEIGHT = "model.wte.weight"
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@dataclass
class Forgery:
    """A snapshot while it is being changed; offsets in `header` count from `data`'s start."""

    manifest: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    canary: Path  # a payload that is executed creates this file
    tensor_file: bytes | None = None  # replaces header and data
    manifest_file: bytes | None = None  # replaces the manifest, or is what is left of it
    tokenizer: bytes = b""
    place: list[Callable[[Path, Path], None]] = field(default_factory=list)  # change the files at the end

    def write(self, manifest_path: Path, tensor_path: Path) -> None:
        content = self.tensor_file
        if content is None:
            text = json.dumps(self.header, separators=(",", ":")).encode()
            content = with_header(text + b" " * (-len(text) % 8), self.data)
        written = {tensor_path: content, tensor_path.with_suffix(".tokenizer"): self.tokenizer}
        files = [
            {"name": path.name, "sha256": hashlib.sha256(one).hexdigest(), "bytes": len(one)}
            for path, one in written.items()
        ]
        joint = hashlib.sha256("".join(str(file["sha256"]) for file in files).encode()).hexdigest()
        self.manifest |= {"files": files, "sha256": joint, "bytes": sum(map(len, written.values()))}
        encoded = seal(self.manifest) if self.manifest_file is None else self.manifest_file
        tensor_path.with_suffix(".optimizer.safetensors").unlink()
        for path, one in written.items():
            path.write_bytes(one)
        manifest_path.write_bytes(encoded)
        for change in self.place:
            change(manifest_path, tensor_path)


def read(manifest_path: Path, tensor_path: Path, canary: Path) -> Forgery:
    header: dict[str, Any] = {}
    data = b""
    for path in (tensor_path, tensor_path.with_suffix(".optimizer.safetensors")):
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:end]).items():
            offsets = [len(data) + offset for offset in entry["data_offsets"]]
            header[name] = entry | {"data_offsets": offsets}
        data += content[end:]
    tokenizer = tensor_path.with_suffix(".tokenizer").read_bytes()
    return Forgery(json.loads(manifest_path.read_text()), header, data, canary, tokenizer=tokenizer)


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def seal(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


@dataclass
class Payload:
    canary: Path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def pickled(forgery: Forgery) -> bytes:
    return pickle.dumps(Payload(forgery.canary))


def zipped(forgery: Forgery) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(forgery))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def name_twice(forgery: Forgery) -> bytes:
    first = json.dumps({WEIGHT: forgery.header[WEIGHT]})
    return with_header((first[:-1] + ", " + json.dumps(forgery.header)[1:]).encode(), forgery.data)


TENSOR_FILES: dict[str, Callable[[Forgery], bytes]] = {
    "tensors: a pickle": pickled,
    "tensors: a zip of torch.save": zipped,
    "tensors: a pickle behind a header's length": lambda forgery: with_header(pickled(forgery), forgery.data),
    "header: longer than the file": lambda forgery: (2**40).to_bytes(8, "little") + forgery.data,
    "header: no JSON": lambda forgery: with_header(b"no JSON at all", forgery.data),
    "header: nested 100,000 deep": lambda forgery: with_header(DEEP, forgery.data),
    "header: 4 MB of small values": lambda forgery: with_header(
        b'{"a": [' + b"{}," * 1_300_000 + b"0]}", forgery.data
    ),
    "header: a name twice": name_twice,
}
MANIFEST_FILES: dict[str, Callable[[Forgery], bytes]] = {
    "manifest: empty": lambda _: b"",
    "manifest: a pickle": pickled,
    "manifest: nested 100,000 deep": lambda _: DEEP,
    "manifest: 4 MB of small values": lambda _: b'{"a": [' + b"[]," * 1_300_000 + b"0]}",
    "manifest: 4 MB of escaped quotes": lambda _: b'{"a": "' + b'\\"' * 2_000_000,
    "manifest: 100 MB": lambda _: b" " * (100 << 20),
    "manifest: a checksum of nothing": lambda _: seal({"schema": 4, "step": 4}),
}
# Fields of one tensor.
HEADER_FIELDS: dict[str, dict[str, Any]] = {
    "header: offsets past the end": {"data_offsets": [0, 2**40], "shape": [2**38]},
    "header: offsets overlap": {"data_offsets": [4, 4 + 4], "shape": [1]},
    "header: negative offsets": {"data_offsets": [-8, 0]},
    "header: negative shape": {"shape": [-1, -32]},
    "header: huge shape": {"shape": [2**62, 2**62]},
    "header: an unknown dtype": {"dtype": "PICKLE"},
}
NEW_NAMES = {"header: ../ in a name": f"../../{WEIGHT}", "model: a tensor has another name": f"{WEIGHT}s"}
NOT_A_NUMBER = {"model: NaN": WEIGHT, "optimizer: NaN": "optimizer.wte.weight.exp_avg_sq"}
MANIFEST_FIELDS: dict[str, dict[str, Any]] = {
    "manifest: step is another": {"step": 3},
    "manifest: schema is -1": {"schema": -1},
    "manifest: an unknown tokenizer": {"tokenizer": {"kind": "pickle", "vocab_size": 65}},
    "manifest: 2**62 tokens": {"tokenizer": {"kind": "char", "vocab_size": 2**62}},
    "manifest: saved after 2**62": {"after": 2**62},
    "manifest: generation is -1": {"generation": -1},
    "manifest: generation is 2**63 - 1": {"generation": 2**63 - 1},
}
# Contents of the tokenizer's file, with the right checksums.
TOKENIZERS: dict[str, Callable[[Forgery], bytes]] = {
    "tokenizer: empty": lambda _: b"",
    "tokenizer: a pickle": pickled,
    "tokenizer: nested 100,000 deep": lambda _: DEEP,
    "tokenizer: a character twice": lambda forgery: forgery.tokenizer.replace(b'"a": ', b'"b": '),
}
# Fields of the manifest's parts.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "manifest: no tokenizer": ("tokenizer", {"kind": "none"}),
    "config: n_layer is 10**9": ("model", {"n_layer": 10**9}),
    "config: n_embd is 10**12": ("model", {"n_embd": 10**12}),
    "config: the other optimizer": ("optimizer", {"name": "adamw"}),
}
# Functions that put something else in a file's place after it is written.
PLACED: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file of 1 TB": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**12),
}
# Fields that are valid by themselves: a snapshot with them is used or refused, but nothing is allocated.
VALID_FIELDS: dict[str, dict[str, Any]] = {
    "valid: 2**62 windows": {"windows": 2**62},
    "valid: unchanged": {},
    "valid: schema is 3": {"schema": 3},
    "valid: schema is 5": {"schema": 5},
    "valid: another text": {"data": {"path": "x", "sha256": "0" * 64}},
}


def truncated(forgery: Forgery) -> None:
    forgery.place.append(lambda _, path: os.truncate(path, path.stat().st_size // 2))


def transposed(forgery: Forgery) -> None:
    for entry in forgery.header.values():
        entry["shape"] = entry["shape"][::-1]


def huge_tokenizer(forgery: Forgery) -> None:
    forgery.tokenizer = bytes(1 << 30)
    forgery.place.append(lambda _, path: os.truncate(path.with_suffix(".tokenizer"), 0))
    forgery.place.append(lambda _, path: os.truncate(path.with_suffix(".tokenizer"), 1 << 30))


def missing_tensor(forgery: Forgery) -> None:
    """Remove the tensor at the end of the data, so that all other offsets stay valid."""
    name = max(forgery.header, key=lambda name: forgery.header[name]["data_offsets"][1])
    forgery.data = forgery.data[: forgery.header.pop(name)["data_offsets"][0]]


def extra_tensor(forgery: Forgery) -> None:
    size = len(forgery.data)
    forgery.header["optimizer.code.step"] = {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]}
    forgery.data += bytes(4)


def place_instead(change: Callable[[Path], Any], subject: str, manifest: Path, tensors: Path) -> None:
    path = manifest if subject == "manifest" else tensors
    path.unlink()
    change(path)


def forge(kind: str, forgery: Forgery) -> None:
    subject, _, rest = kind.partition(": ")
    if kind in OTHERS:
        OTHERS[kind](forgery)
    elif kind in TENSOR_FILES:
        forgery.tensor_file = TENSOR_FILES[kind](forgery)
    elif kind in MANIFEST_FILES:
        forgery.manifest_file = MANIFEST_FILES[kind](forgery)
    elif kind in TOKENIZERS:
        forgery.tokenizer = TOKENIZERS[kind](forgery)
        forgery.manifest["tokenizer"]["sha256"] = hashlib.sha256(forgery.tokenizer).hexdigest()
    elif kind in HEADER_FIELDS:
        forgery.header[WEIGHT].update(HEADER_FIELDS[kind])
    elif kind in NEW_NAMES:
        entries = forgery.header.items()  # the order of the header stays
        forgery.header = {NEW_NAMES[kind] if name == WEIGHT else name: entry for name, entry in entries}
    elif kind in NOT_A_NUMBER:
        begin = forgery.header[NOT_A_NUMBER[kind]]["data_offsets"][0]
        number = struct.pack("<f", float("nan"))
        forgery.data = forgery.data[:begin] + number + forgery.data[begin + 4 :]
    elif kind in PARTS:
        part, values = PARTS[kind]
        parent = forgery.manifest if part == "tokenizer" else forgery.manifest["config"]
        parent[part] |= values
    elif rest in PLACED:
        forgery.place.append(functools.partial(place_instead, PLACED[rest], subject))
    else:
        forgery.manifest.update((MANIFEST_FIELDS | VALID_FIELDS)[kind])


OTHERS: dict[str, Callable[[Forgery], None]] = {
    "tensors: truncated": truncated,
    "tokenizer: a sparse file of 1 GB": huge_tokenizer,
    "model: a tensor is missing": missing_tensor,
    "model: a tensor too many": extra_tensor,
    "model: every matrix transposed": transposed,
}
KINDS = [
    *TENSOR_FILES, *OTHERS, *HEADER_FIELDS, *NEW_NAMES, *NOT_A_NUMBER, *MANIFEST_FILES, *MANIFEST_FIELDS,
    *TOKENIZERS, *PARTS,
    *(f"{subject}: {what}" for subject in ("tensors", "manifest") for what in PLACED),
]  # fmt: skip
