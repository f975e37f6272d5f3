import json

import pytest
import torch
from support.snapshots import CONTENT, TENSORS

from mingpt.errors import CorruptSnapshot, UserError
from mingpt.snapshot import Snapshot
from mingpt.snapshot.manifest import SCHEMA, add_checksum, decode_manifest, encode_manifest, file_name


def test_a_manifest_is_read_back_with_the_size_and_the_hash_of_the_tensors() -> None:
    manifest = decode_manifest(encode_manifest({"step": 4, "config": {"a": [1, 2.5, None]}}, "ab" * 32, 17))
    assert (manifest["step"], manifest["config"]) == (4, {"a": [1, 2.5, None]})
    assert (manifest["sha256"], manifest["bytes"], manifest["schema"]) == ("ab" * 32, 17, SCHEMA)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"{}", b"null", b'"text"', b"", b"\xff", add_checksum({"step": 1})[:-1]]
)
def test_a_manifest_that_is_another_kind_of_text_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        decode_manifest(content)


def test_a_manifest_with_another_value_is_corrupt() -> None:
    manifest = json.loads(encode_manifest({"step": 4}, "ab" * 32, 17)) | {"step": 5}
    with pytest.raises(CorruptSnapshot, match="its manifest is damaged"):
        decode_manifest((json.dumps(manifest, indent=1) + "\n").encode())


def test_a_format_of_the_future_is_named() -> None:
    with pytest.raises(UserError, match=r"the snapshot of step 4 has schema version 99, .* reads version 1"):
        decode_manifest(add_checksum({"schema": 99, "step": 4}))


def test_the_files_of_a_step_sort_by_their_step() -> None:
    names = [file_name(step, "json") for step in (9, 10, 12_345_678)]
    assert names == ["step_00000009.json", "step_00000010.json", "step_12345678.json"]


def test_the_tensors_of_a_part_have_names_without_its_prefix() -> None:
    snapshot = Snapshot({}, bytes(CONTENT))
    assert list(snapshot.tensors("optimizer.")) == ["wte.step"]
    tensors = snapshot.tensors()
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(TENSORS[name], tensor) for name, tensor in tensors.items())
