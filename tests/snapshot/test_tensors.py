import hashlib
import json
from typing import Any

import pytest
import torch
from support.snapshots import TENSORS, open_content, to_safetensors

from mingpt.base.errors import CorruptSnapshot
from mingpt.snapshot.reading import MAX_HEADER
from mingpt.snapshot.store import verify_file

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


def make_file(header: Any, data: bytes = bytes(24)) -> bytes:
    """A safetensors file with this header, as JSON or as bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed(**values: Any) -> bytes:
    """A file in whose header the second tensor is changed."""
    return make_file({"a": A, "b": B | values})


def test_the_tensors_of_a_good_file_are_read() -> None:
    file = open_content(to_safetensors(TENSORS))
    for name, tensor in TENSORS.items():
        assert torch.equal(file.read(name), tensor)
    assert open_content(make_file({"a": A, "b": B})).specs.keys() == {"a", "b"}


BAD: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\x02",
    "header past the end": (1000).to_bytes(8, "little") + b"{}",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "header above the limit": make_file(b" " * (MAX_HEADER + 1)),
    "not JSON": make_file(b"not JSON"),
    "deep nesting": make_file(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "pickle": b"\x80\x04\x95" + bytes(200),
    "no fields": make_file({"a": A, "b": {}}),
    "more fields": changed(code="import os"),
    "not an object": make_file({"a": A, "b": [1]}),
    "unknown dtype": changed(dtype="F8_E4M3"),
    "negative shape": changed(shape=[-2]),
    "huge shape": changed(shape=[2**62]),
    "shape of floats": changed(shape=[2.0]),
    "negative shape of a fitting size": changed(shape=[-2, -1]),
    "shape of text": changed(shape="2"),
    "no shape": changed(shape=None),
    "type of no text": changed(dtype=[]),
    "spaces": make_file(json.dumps({"a": A, "b": B}).encode()),
    "metadata": make_file({"__metadata__": {"format": "pt"}, "a": A, "b": B}),
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
def test_a_header_that_does_not_describe_its_file_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptSnapshot) as error:
        open_content(content)
    assert len(str(error.value)) < 500


def verify(content: bytes) -> None:
    verify_file(open_content(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("piece_bytes", [104, 1 << 20])
def test_a_single_number_that_is_not_finite_is_found(
    dtype: torch.dtype, number: float, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is found whatever the size of the pieces in which the file is read."""
    monkeypatch.setattr("mingpt.snapshot.store.PIECE_BYTES", piece_bytes)
    tensor = torch.randn(7, 11).to(dtype)
    verify(to_safetensors({"model.a": tensor, "model.b": torch.arange(5)}))
    for row, column in ((0, 0), (3, 5), (6, 10)):
        damaged = tensor.clone()
        damaged[row, column] = number
        with pytest.raises(CorruptSnapshot, match=r"model\.a.*not finite"):
            verify(to_safetensors({"model.a": damaged}))
