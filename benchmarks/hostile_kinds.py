"""Snapshots that nobody's run has written, one function per kind; for hostile.py.

Each changes a valid snapshot. Checksums and sizes are put right afterwards, so that they do not give it away.
Imports no torch: the peak memory of a child process begins with that of its parent.
"""

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

MB = 1 << 20
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@dataclass
class Forgery:
    """A snapshot while it is being changed; offsets in `header` count from `data`'s start.

    Weights and optimizer state lie in one file, which is as valid as two.
    """

    manifest: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    canary: Path  # a payload that is executed creates this file
    tensor_file: bytes | None = None  # instead of header and data
    manifest_file: bytes | None = None  # instead of the manifest, or what is left of it
    change_files: Callable[[list[dict[str, Any]]], Any] = len  # changes the manifest's list of files
    seals: bool = True  # checksums and sizes are put right
    place: list[Callable[[Path, Path], None]] = field(default_factory=list)  # changes the files at last

    def write(self, manifest_path: Path, tensor_path: Path) -> None:
        content = self.tensor_file
        if content is None:
            content = with_header(json.dumps(self.header).encode(), self.data)
        if self.seals:
            digest = hashlib.sha256(content).hexdigest()
            files: list[dict[str, Any]] = [
                {"name": tensor_path.name, "sha256": digest, "bytes": len(content)}
            ]
            self.change_files(files)
            joint = hashlib.sha256("".join(file["sha256"] for file in files).encode()).hexdigest()
            self.manifest |= {"files": files, "sha256": joint, "bytes": sum(file["bytes"] for file in files)}
        encoded = seal(self.manifest) if self.manifest_file is None else self.manifest_file
        tensor_path.with_suffix(".optimizer.safetensors").unlink()
        tensor_path.write_bytes(content)
        manifest_path.write_bytes(encoded)
        for change in self.place:
            change(manifest_path, tensor_path)

    def tensor(self, name: str = "model.wte.weight") -> dict[str, Any]:
        entry: dict[str, Any] = self.header[name]
        return entry

    def put_numbers(self, name: str, *numbers: float) -> None:
        """Overwrite the first numbers of a tensor."""
        begin = self.tensor(name)["data_offsets"][0]
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        self.data = self.data[:begin] + packed + self.data[begin + len(packed) :]

    def setting(self, section: str, **values: Any) -> None:
        self.manifest["config"][section] |= values


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
    return Forgery(json.loads(manifest_path.read_text()), header, data, canary)


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def seal(manifest: dict[str, Any]) -> bytes:
    """A manifest's bytes with the right checksum, as mingpt.snapshot.manifest writes them."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


class Payload:
    """Unpickled, it creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def zip_with(canary: Path) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(canary)))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def tensor_file(make: Callable[[Forgery], bytes]) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        forgery.tensor_file = make(forgery)

    return change


def manifest_file(make: Callable[[Forgery], bytes]) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        forgery.manifest_file = make(forgery)

    return change


def header_file(header: Callable[[], bytes]) -> Callable[[Forgery], None]:
    return tensor_file(lambda forgery: with_header(header(), forgery.data))


def header_field(**values: Any) -> Callable[[Forgery], None]:
    """Of one tensor."""
    return lambda forgery: forgery.tensor().update(values)


def manifest_field(**values: Any) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.manifest.update(values)


def without(name: str) -> Callable[[Forgery], None]:
    """The manifest, without a field."""

    def change(forgery: Forgery) -> None:
        forgery.manifest.pop(name)
        forgery.seals = name not in ("sha256", "bytes", "files")

    return change


def without_seals(**values: Any) -> Callable[[Forgery], None]:
    """As `manifest_field`, for fields that sealing would put right."""

    def change(forgery: Forgery) -> None:
        forgery.manifest.update(values)
        forgery.seals = False

    return change


def files(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Forgery], None]:
    """The manifest's list of files; sums and checksums fit it."""

    def change_list(forgery: Forgery) -> None:
        forgery.change_files = change

    return change_list


def setting(section: str, **values: Any) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.setting(section, **values)


def software(**values: Any) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.manifest["software"].update(values)


def numbers(name: str, *values: float) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.put_numbers(name, *values)


def placed(change: Callable[[Path], Any], kind: str) -> Callable[[Forgery], None]:
    """What takes a file's place after it is written; `kind` is json or safetensors."""

    def place(manifest_path: Path, tensor_path: Path) -> None:
        path = manifest_path if kind == "json" else tensor_path
        path.unlink()
        change(path)

    return lambda forgery: forgery.place.append(place)


def renamed(old: str, new: str) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        forgery.header = {new if name == old else name: entry for name, entry in forgery.header.items()}

    return change


def duplicate(forgery: Forgery) -> bytes:
    text = json.dumps(forgery.header)
    first = json.dumps({"model.wte.weight": forgery.tensor()})
    return with_header((first[:-1] + ", " + text[1:]).encode(), forgery.data)


def other_model(forgery: Forgery) -> None:
    """Every matrix transposed."""
    for entry in forgery.header.values():
        entry["shape"] = entry["shape"][::-1]


def missing_tensor(forgery: Forgery) -> None:
    """The last one, so that the rest is in order."""
    name = max(forgery.header, key=lambda name: forgery.header[name]["data_offsets"][1])
    forgery.data = forgery.data[: forgery.header.pop(name)["data_offsets"][0]]


def extra_tensor(forgery: Forgery) -> None:
    size = len(forgery.data)
    forgery.header["optimizer.code.step"] = {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]}
    forgery.data += bytes(4)


def truncate(forgery: Forgery) -> None:
    forgery.place.append(lambda _, path: os.truncate(path, path.stat().st_size // 2))


def grow(forgery: Forgery) -> None:
    """A sparse file."""
    forgery.place.append(lambda _, path: os.truncate(path, 10**12))


def grow_manifest(forgery: Forgery) -> None:
    forgery.place.append(lambda path, _: os.truncate(path, 10**12))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge_vocabulary(forgery: Forgery) -> None:
    forgery.manifest["vocabulary"] = "a" * (7 * MB // 2)


def wide_vocabulary(forgery: Forgery) -> None:
    """Distinct, in order, and none of them one byte."""
    forgery.manifest["vocabulary"] = "".join(map(chr, range(0x10000, 0x10000 + 600_000)))


Kind = Callable[[Forgery], None]
KINDS: dict[str, Kind] = {
    "tensors: a pickle": tensor_file(lambda forgery: pickle.dumps(Payload(forgery.canary))),
    "tensors: a zip of torch.save": tensor_file(lambda forgery: zip_with(forgery.canary)),
    "tensors: a pickle behind a header's length": tensor_file(
        lambda forgery: with_header(pickle.dumps(Payload(forgery.canary)), forgery.data)
    ),
    "tensors: empty": tensor_file(lambda _: b""),
    "tensors: 3 bytes": tensor_file(lambda _: b"abc"),
    "tensors: truncated": truncate,
    "tensors: a sparse file of 1 TB": grow,
    "tensors: a folder": placed(Path.mkdir, "safetensors"),
    "tensors: a FIFO": placed(os.mkfifo, "safetensors"),
    "tensors: a link to itself": placed(link_to_itself, "safetensors"),
    "tensors: a link to /dev/zero": placed(link_to_zeros, "safetensors"),
    "header: longer than the file": tensor_file(lambda forgery: (2**40).to_bytes(8, "little") + forgery.data),
    "header: no JSON": header_file(lambda: b"no JSON at all"),
    "header: a list": header_file(lambda: b"[1, 2, 3]"),
    "header: nested 100,000 deep": header_file(lambda: DEEP),
    "header: 4 MB of small values": header_file(lambda: b'{"a": [' + b"{}," * 1_300_000 + b"0]}"),
    "header: 100 MB": header_file(lambda: b'{"a": "' + b"x" * (100 * MB) + b'"}'),
    "header: a name twice": tensor_file(duplicate),
    "header: ../ in a name": renamed("model.wte.weight", "../../model.wte.weight"),
    "header: a backslash in a name": renamed("model.wte.weight", "..\\model.wte.weight"),
    "header: NUL in a name": renamed("model.wte.weight", "model.wte.weight\0"),
    "header: offsets past the end": header_field(data_offsets=[0, 2**40], shape=[2**38]),
    "header: offsets overlap": header_field(data_offsets=[4, 4 + 4], shape=[1]),
    "header: negative offsets": header_field(data_offsets=[-8, 0]),
    "header: negative shape": header_field(shape=[-1, -32]),
    "header: huge shape": header_field(shape=[2**62, 2**62]),
    "header: shape of text": header_field(shape=["60", "32"]),
    "header: an unknown dtype": header_field(dtype="PICKLE"),
    "header: whole numbers": header_field(dtype="I32"),
    "model: a tensor is missing": missing_tensor,
    "model: a tensor too many": extra_tensor,
    "model: a tensor has another name": renamed("model.wte.weight", "model.wte.weights"),
    "model: every matrix transposed": other_model,
    "model: NaN": numbers("model.wte.weight", float("nan")),
    "model: infinite": numbers("model.lm_head.weight", 1.0, float("-inf")),
    "optimizer: NaN": numbers("optimizer.wte.weight.exp_avg_sq", float("nan")),
    "manifest: empty": manifest_file(lambda _: b""),
    "manifest: a pickle": manifest_file(lambda forgery: pickle.dumps(Payload(forgery.canary))),
    "manifest: a list": manifest_file(lambda _: b"[]"),
    "manifest: nested 100,000 deep": manifest_file(
        lambda _: b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "manifest: 4 MB of small values": manifest_file(lambda _: b'{"a": [' + b"[]," * 1_300_000 + b"0]}"),
    "manifest: 4 MB of escaped quotes": manifest_file(lambda _: b'{"a": "' + b'\\"' * 2_000_000),
    "manifest: 100 MB": manifest_file(lambda _: b" " * (100 * MB)),
    "manifest: a sparse file of 1 TB": grow_manifest,
    "manifest: a folder": placed(Path.mkdir, "json"),
    "manifest: a FIFO": placed(os.mkfifo, "json"),
    "manifest: a link to itself": placed(link_to_itself, "json"),
    "manifest: a checksum of nothing": manifest_file(lambda forgery: seal({"schema": 1, "step": 4})),
    "manifest: no windows": without("windows"),
    "manifest: no config": without("config"),
    "manifest: no software": without("software"),
    "manifest: no vocabulary": without("vocabulary"),
    "manifest: no sha256": without("sha256"),
    "files: none": files(lambda listed: listed.clear()),
    "files: one is listed twice": files(lambda listed: listed.append(listed[0])),
    "files: one is not there": files(
        lambda listed: listed.append(listed[0] | {"name": "step_00000004.optimizer.safetensors"})
    ),
    "files: another name": files(lambda listed: listed[0].update(name="step_00000004.pt")),
    "files: another step's": files(lambda listed: listed[0].update(name="step_00000002.safetensors")),
    "files: ../ in a name": files(
        lambda listed: listed[0].update(name="../snapshots/step_00000004.safetensors")
    ),
    "files: a path": files(lambda listed: listed[0].update(name="/dev/zero")),
    "files: negative bytes": files(lambda listed: listed[0].update(bytes=-1)),
    "files: 10**15 bytes": files(lambda listed: listed[0].update(bytes=10**15)),
    "files: 100,000 parts": files(lambda listed: listed.extend(listed * 20_000)),
    "manifest: files are text": without_seals(files="step_00000004.safetensors"),
    "manifest: no files": without("files"),
    "manifest: step is negative": manifest_field(step=-4),
    "manifest: step is another": manifest_field(step=3),
    "manifest: step is true": manifest_field(step=True),
    "manifest: step is text": manifest_field(step="4"),
    "manifest: step is 10**30": manifest_field(step=10**30, windows=10**31),
    "manifest: windows are negative": manifest_field(windows=-1),
    "manifest: fewer windows than steps": manifest_field(windows=1),
    "manifest: windows are null": manifest_field(windows=None),
    "manifest: schema is -1": manifest_field(schema=-1),
    "manifest: schema is text": manifest_field(schema="1"),
    "manifest: audit is null": manifest_field(audit=None),
    "manifest: metrics are text": manifest_field(metrics={"val": {"val/loss": "low"}}),
    "manifest: metrics are NaN": manifest_field(metrics={"val": {"val/loss": float("nan")}}),
    "manifest: data is text": manifest_field(data="text"),
    "manifest: 10**9 threads": software(threads=10**9),
    "manifest: threads are true": software(threads=True),
    "manifest: an unknown type": software(dtype="object"),
    "config: n_layer is 10**9": setting("model", n_layer=10**9),
    "config: n_embd is 10**12": setting("model", n_embd=10**12),
    "config: n_head is 0": setting("model", n_head=0),
    "config: an unknown tokenizer": setting("data", tokenizer="os.system"),
    "config: block_size is text": setting("data", block_size="32"),
    "config: an unknown optimizer": setting("optimizer", name="sgd"),
    "config: the other optimizer": setting("optimizer", name="adamw"),
    "vocabulary: empty": manifest_field(vocabulary=""),
    "vocabulary: a character twice": manifest_field(vocabulary="aabc"),
    "vocabulary: half a character": manifest_field(vocabulary="\ud800"),
    "vocabulary: 3.5 MB": huge_vocabulary,
    "vocabulary: 600,000 characters": wide_vocabulary,
}
# Valid in itself: used or refused, but no allocation follows from it.
VALID: dict[str, Kind] = {
    "valid: block_size is 10**15": setting("data", block_size=10**15),
    "valid: 2**62 windows": manifest_field(windows=2**62),
    "valid: schema is 1": manifest_field(schema=1),
    "valid: schema is 3": manifest_field(schema=3),
    "valid: another text": manifest_field(data={"path": "x", "sha256": "0" * 64}),
}
