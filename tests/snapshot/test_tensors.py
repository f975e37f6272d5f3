import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.snapshots import CONTENT, TENSORS

from mingpt.errors import CorruptSnapshot
from mingpt.snapshot import read_safetensors, tensor_views, to_safetensors
from mingpt.snapshot.tensors import MAX_HEADER, check_finite, read_entries

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


def make_file(header: Any, data: bytes = bytes(24)) -> bytes:
    """A safetensors file with this header, as JSON or as bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed(**values: Any) -> bytes:
    """A file in whose header the second tensor is changed."""
    return make_file({"a": A, "b": B | values})


def test_the_tensors_of_a_good_file_are_views_of_its_bytes() -> None:
    content = bytes(CONTENT)
    first, second = tensor_views(content), tensor_views(content)
    for name, tensor in TENSORS.items():
        assert torch.equal(first[name], tensor)
        assert first[name].data_ptr() == second[name].data_ptr(), "nothing is copied"
    assert read_entries(make_file({"a": A, "b": B})).keys() == {"a", "b"}


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
    read = tensor_views(read_safetensors(str(tmp_path / "file")))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    odd = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    odd["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    numbers = bytes([7]) + torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert tensor_views(make_file(odd, numbers))["b"].tolist() == [1.0, 2.0]


BAD: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\x02",
    "only a length": bytes(8),
    "header past the end": (1000).to_bytes(8, "little") + b"{}",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "header above the limit": make_file(b" " * (MAX_HEADER + 1)),
    "not JSON": make_file(b"not JSON"),
    "a list": make_file([]),
    "not UTF-8": make_file(b'{"a\xff": 1}'),
    "deep nesting": make_file(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "many values": make_file(b'{"a": [' + b"0," * 250_000 + b"0]}"),
    "duplicate name": make_file(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}'.encode(), bytes(16)),
    "pickle": b"\x80\x04\x95" + bytes(200),
    "zip": b"PK\x03\x04" + bytes(200),
    "slash in a name": make_file({"a": A, "../b": B}),
    "backslash in a name": make_file({"a": A, "..\\b": B}),
    "NUL in a name": make_file({"a": A, "b\0": B}),
    "empty name": make_file({"a": A, "": B}),
    "long name": make_file({"a": A, "b" * 1000: B}),
    "no fields": make_file({"a": A, "b": {}}),
    "more fields": changed(code="import os"),
    "not an object": make_file({"a": A, "b": [1]}),
    "unknown dtype": changed(dtype="F8_E4M3"),
    "dtype is a list": changed(dtype=["F32"]),
    "negative shape": changed(shape=[-2]),
    "two negative sizes": changed(shape=[-1, -2]),
    "huge shape": changed(shape=[2**62]),
    "shape that overflows": changed(shape=[2**32, 2**32]),
    "shape past any number": changed(shape=[10**40]),
    "shape of floats": changed(shape=[2.0]),
    "shape of bools": changed(shape=[True, 2]),
    "shape is a text": changed(shape="2"),
    "many dimensions": changed(shape=[1] * 60 + [2]),
    "offsets past the end": changed(shape=[1000], data_offsets=[16, 4016]),
    "offsets backwards": changed(shape=[0], data_offsets=[24, 16]),
    "negative offsets": changed(data_offsets=[-8, 0]),
    "one offset": changed(data_offsets=[16]),
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
    with pytest.raises(CorruptSnapshot):
        read_entries(content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_single_number_that_is_not_finite_is_found(dtype: torch.dtype, number: float) -> None:
    tensor = torch.randn(70, 11).to(dtype)
    check_finite(bytes(to_safetensors({"model.a": tensor, "model.b": torch.arange(5)})))
    tensor[69, 10] = number
    with pytest.raises(CorruptSnapshot, match=r"model\.a.*not finite"):
        check_finite(bytes(to_safetensors({"model.a": tensor})))
