import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.snapshots import TENSORS, make_manifest, open_content, to_safetensors

from mingpt.base.errors import CorruptSnapshot
from mingpt.snapshot import Snapshot, read_safetensors
from mingpt.snapshot.reading import MAX_HEADER
from mingpt.snapshot.store import verify_file

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


def make_file(header: Any, data: bytes = bytes(24)) -> bytes:
    """A safetensors file with this header, as JSON or as bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed(**values: Any) -> bytes:
    """A file in whose header the second tensor is changed."""
    return make_file({"a": A, "b": B | values})


def test_the_tensors_of_a_good_file_are_read_whole_or_by_rows() -> None:
    file = open_content(to_safetensors(TENSORS))
    for name, tensor in TENSORS.items():
        assert torch.equal(file.read(name), tensor)
    wte = TENSORS["model.wte"]
    for begin, end in ((0, 3), (1, 2), (2, 3), (1, 1), (3, 3)):
        assert torch.equal(file.read("model.wte", begin, end), wte[begin:end])
    assert torch.equal(file.read("model.half", 2), TENSORS["model.half"][2:])
    with pytest.raises(AssertionError, match="has no rows 2 to 4"):
        file.read("model.wte", 2, 4)
    assert open_content(make_file({"a": A, "b": B})).entries.keys() == {"a", "b"}


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    """Also metadata, an empty tensor, a scalar and offsets that are not aligned."""
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(3, dtype=torch.float16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "weight": torch.randn(3, 5),
    }
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    read = read_safetensors(str(tmp_path / "file"))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    odd = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    odd["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    numbers = bytes([7]) + torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert open_content(make_file(odd, numbers)).read("b").tolist() == [1.0, 2.0]


BAD: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\x02",
    "header past the end": (1000).to_bytes(8, "little") + b"{}",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "header above the limit": make_file(b" " * (MAX_HEADER + 1)),
    "not JSON": make_file(b"not JSON"),
    "deep nesting": make_file(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "duplicate name": make_file(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}'.encode(), bytes(16)),
    "pickle": b"\x80\x04\x95" + bytes(200),
    "slash in a name": make_file({"a": A, "../b": B}),
    "empty name": make_file({"a": A, "": B}),
    "long name": make_file({"a": A, "b" * 1000: B}),
    "no fields": make_file({"a": A, "b": {}}),
    "more fields": changed(code="import os"),
    "not an object": make_file({"a": A, "b": [1]}),
    "unknown dtype": changed(dtype="F8_E4M3"),
    "negative shape": changed(shape=[-2]),
    "huge shape": changed(shape=[2**62]),
    "shape of floats": changed(shape=[2.0]),
    "many dimensions": changed(shape=[1] * 60 + [2]),
    "offsets past the end": changed(shape=[1000], data_offsets=[16, 4016]),
    "offsets backwards": changed(shape=[0], data_offsets=[24, 16]),
    "negative offsets": changed(data_offsets=[-8, 0]),
    "offsets of text": changed(data_offsets=["16", "24"]),
    "overlapping": changed(data_offsets=[8, 16]),
    "gap": changed(shape=[1], data_offsets=[20, 24]),
    "bytes after the last": make_file({"a": A, "b": B}, bytes(30)),
    "bytes that are missing": make_file({"a": A, "b": B}, bytes(20)),
    "no tensors but bytes": make_file({}),
}


@pytest.mark.parametrize("content", BAD.values(), ids=list(BAD))
def test_a_header_that_does_not_describe_its_file_is_corrupt(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CorruptSnapshot) as error:
        read_safetensors(str(path))
    assert len(str(error.value)) < 500


def test_a_tensor_in_two_files_is_corrupt() -> None:
    file = open_content(make_file({"a": A, "b": B}))
    with pytest.raises(CorruptSnapshot, match="its tensor 'a' is in two files"):
        Snapshot(make_manifest(1), [file, file])


def verify(content: bytes) -> None:
    verify_file(open_content(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
def test_a_single_number_that_is_not_finite_is_found(
    dtype: torch.dtype, number: float, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pieces the file is read in."""
    monkeypatch.setattr("mingpt.snapshot.store.PIECE_BYTES", piece_bytes)
    tensor = torch.randn(7, 11).to(dtype)
    verify(to_safetensors({"model.a": tensor, "model.b": torch.arange(5)}))
    for row, column in ((0, 0), (3, 5), (6, 10)):
        damaged = tensor.clone()
        damaged[row, column] = number
        with pytest.raises(CorruptSnapshot, match=r"model\.a.*not finite"):
            verify(to_safetensors({"model.a": damaged}))


@pytest.mark.parametrize("piece_bytes", [16, 17, 40, 1 << 20])
def test_pieces_cut_no_number_in_two_and_cover_the_file(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of these numbers are finite only in their right order; they are not aligned."""
    monkeypatch.setattr("mingpt.snapshot.store.PIECE_BYTES", piece_bytes)
    numbers = torch.tensor([0x80, 0xFF, 0x00, 0x01] * 9, dtype=torch.uint8)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [9], "data_offsets": [3, 39]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [39, 39]},
        "c": {"dtype": "F64", "shape": [], "data_offsets": [39, 47]},
    }
    end = torch.tensor(2.5, dtype=torch.float64).numpy().tobytes()
    content = make_file(header, b"abc" + numbers.numpy().tobytes() + end)
    verify(content)
    with pytest.raises(CorruptSnapshot, match="SHA-256"):
        verify_file(open_content(content), hashlib.sha256(content + b"!").hexdigest())
