import hashlib
import json
from typing import Any

import pytest
from support.snapshots import make_manifest, manifest_fields

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.config import Config, to_dict
from mingpt.snapshot import Snapshot
from mingpt.snapshot.manifest import (
    SCHEMA,
    FileRecord,
    add_checksum,
    decode_manifest,
    encode_manifest,
    finite_records,
    is_distrusted,
)

RECORDS = [
    FileRecord(name="step_00000004.safetensors", sha256="ab" * 32, bytes=17),
    FileRecord(name="step_00000004.optimizer.safetensors", sha256="cd" * 32, bytes=30),
]
FILES = [record.model_dump() for record in RECORDS]
WHOLE: dict[str, Any] = {
    "schema": SCHEMA,
    **manifest_fields(4, loss=1.5),
    "files": FILES,
    "sha256": hashlib.sha256(b"ab" * 32 + b"cd" * 32).hexdigest(),
    "bytes": 47,
}
CONFIG = to_dict(Config())


def with_setting(section: str, **settings: object) -> dict[str, Any]:
    """The default configuration, as a manifest's field, with other values in one section."""
    return {"config": CONFIG | {section: CONFIG[section] | settings}}


def with_software(**values: object) -> dict[str, Any]:
    return {"software": WHOLE["software"] | values}


def with_file(**values: object) -> dict[str, Any]:
    """The second of the files with other values; `bytes` and `sha256` of all files match."""
    return listing(RECORDS[0], RECORDS[1].model_copy(update=values))


def listing(*records: FileRecord) -> dict[str, Any]:
    listed = make_manifest(4).with_files(records)
    return {"files": [dict(record) for record in records], "sha256": listed.sha256, "bytes": listed.bytes}


def test_a_manifest_is_read_back_with_the_sizes_and_the_hashes_of_the_files() -> None:
    content = encode_manifest(make_manifest(4, config=CONFIG).with_files(RECORDS))
    manifest = decode_manifest(content)
    assert (manifest.step, manifest.config, json.loads(content)["schema"]) == (4, CONFIG, SCHEMA)
    assert (manifest.files, manifest.sha256, manifest.bytes) == (RECORDS, WHOLE["sha256"], 47)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b"null",
        b"",
        b"\xff",
        add_checksum({"step": 1})[:-1],
        b'{"step": 1, "step": 1}',
        b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_manifest_that_is_another_kind_of_text_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        decode_manifest(content)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("step", {"step": -1}),
    ("step", {"step": True}),
    ("step", {"step": None}),
    ("step", {"step": 2**63, "windows": 2**63}),
    ("windows", {"windows": -5}),
    ("3 windows are fewer than 4 steps", {"windows": 3}),
    ("config", {"config": []}),
    ("config: model", {"config": {"model": 3}}),
    ("config: model.n_layer", with_setting("model", n_layer="2")),
    ("config: model.n_embd", with_setting("model", n_embd=-128)),
    ("config: model.n_embd (128) must be divisible", with_setting("model", n_head=5)),
    ("config: data.tokenizer", with_setting("data", tokenizer=3)),
    ("config: optimizer.learning_rate", with_setting("optimizer", learning_rate="nan")),
    ("tokenizer.kind", {"tokenizer": {"kind": 3, "vocab_size": 65}}),
    ("tokenizer.vocab_size", {"tokenizer": {"kind": "json", "vocab_size": 0}}),
    ("data.files.a", {"data": {"path": "x", "sha256": "0" * 64, "files": {"a": 3}}}),
    ("data.sha256", {"data": {"path": "x", "sha256": "0" * 64 + "\n"}}),
    ("data", {"data": "x"}),
    ("software.threads", with_software(threads=10**9)),
    ("software.dtype", with_software(dtype="int8")),
    ("software.device", with_software(device=["cpu"])),
    ("software.more", with_software(more={"a": "b"})),
    ("software.torch", with_software(torch="2" * 10_000)),
    ("metrics.val", {"metrics": {"val": 3}}),
    ("metrics.val.val/loss", {"metrics": {"val": {"val/loss": True}}}),
    ("metrics.val.val/loss", {"metrics": {"val": {"val/loss": float("nan")}}}),
    ("metrics.val.val/loss", {"metrics": {"val": {"val/loss": float("-inf")}}}),
    ("sha256", {"sha256": "AB" * 32}),
    ("bytes or sha256: the files have other values", {"sha256": "ab" * 32}),
    ("bytes or sha256: the files have other values", {"bytes": 48}),
    ("files", {"files": []}),
    ("files.1.name", with_file(name=3)),
    ("files.1.bytes", with_file(bytes=-1)),
    ("files.1.bytes", with_file(bytes=True)),
    ("files: they are not those", with_file(name="../step_00000004.optimizer.safetensors")),
    ("files: they are not those", with_file(name="step_00000005.optimizer.safetensors")),
    ("files: they are not those", with_file(name="step_00000005.safetensors")),
    ("files: they are not those", {"files": FILES[::-1]}),
    ("files: they are not those", with_file(name="step_00000004-00001-of-00002.safetensors")),
    ("bytes", {"bytes": -1}),
    ("after", {"after": -1}),
    ("it tells of 5 steps at step 4", {"after": 5}),
    ("it tells of 5 steps at step 4", {"evaluated_step": 5}),
    ("it tells of 5 steps at step 4", {"replayed_step": 5}),
    ("it tells of 5 steps at step 4", {"skipped": [5, 0]}),
    ("software.numerics", with_software(numerics=2**63)),
    ("generation", {"generation": -1}),
    ("generation", {"generation": None}),
    ("generation", {"generation": "1"}),
    ("the loss scale 3.0 is no power of two", {"loss_scale": {"scale": 3.0, "good_steps": 0}}),
    ("loss_scale.scale", {"loss_scale": {"scale": 0.5, "good_steps": 0}}),
    ("loss_scale.good_steps", {"loss_scale": {"scale": 1.0, "good_steps": -1}}),
    ("loss_scale.scale", {"loss_scale": {"scale": 2.0**101, "good_steps": 0}}),
    ("schema", {"schema": "1"}),
    ("schema", {"schema": True}),
]


@pytest.mark.parametrize(("expected", "change"), WRONG, ids=[str(change)[-60:] for _, change in WRONG])
def test_a_field_of_another_type_or_range_is_named(expected: str, change: dict[str, Any]) -> None:
    decode_manifest(add_checksum(WHOLE))
    with pytest.raises(CorruptSnapshot) as error:
        decode_manifest(add_checksum(WHOLE | change))
    assert expected in str(error.value) and len(str(error.value)) < 500


def test_fields_and_settings_that_this_version_does_not_know_are_ignored() -> None:
    more = (
        {"more": {"x": 1}} | with_setting("model", future=3) | with_software(device_type="cpu", compiled=True)
    )
    manifest = decode_manifest(add_checksum(WHOLE | more))
    assert Snapshot(manifest, []).config == Config()


def test_a_record_that_json_cannot_hold_is_left_out() -> None:
    """A snapshot of a run whose validation loss is NaN can be read."""
    metrics = {"val": {"step": 4, "val/loss": float("nan")}, "train": {"step": 4, "lr": 0.1}}
    assert finite_records(metrics) == {"train": {"step": 4, "lr": 0.1}}


def test_a_manifest_of_the_version_before_is_read() -> None:
    """Its snapshots on disk have no number of a generation, and count as older than all generations."""
    manifest = decode_manifest(add_checksum(WHOLE | {"schema": 3}))
    assert (manifest.step, manifest.generation, manifest.after, manifest.files) == (4, 0, 0, RECORDS)


def test_a_format_of_the_future_or_the_past_is_named() -> None:
    """Fields of another schema may differ; such a manifest is not called corrupt, so it is not renamed."""
    for schema in (1, 2, 5, 99, 10**400):
        expected = (
            rf"the snapshot of step 4 has schema version {str(schema)[:20]}, .* versions 3 and 4: go on"
        )
        with pytest.raises(UserError, match=expected):
            decode_manifest(add_checksum({"schema": schema, "step": 4}))


@pytest.mark.parametrize(
    ("step", "generation", "entries", "expected"),
    [
        (20, 1, [], False),
        (20, 1, [(20, 2)], False),
        (21, 1, [(20, 2)], True),
        (21, 2, [(20, 2)], False),
        (21, 2, [(20, 3)], True),
        (21, 0, [(20, 2)], True),
        (20, 0, [(20, 2)], False),
        (25, 2, [(20, 2), (22, 4)], True),
        (25, 3, [(30, 4), (20, 2)], False),
        (1, 0, [(0, 1)], True),
        (0, 0, [(0, 1)], False),
    ],
)
def test_what_was_saved_after_the_last_agreement_and_before_the_next_generation_is_distrusted(
    step: int, generation: int, entries: list[tuple[int, int]], expected: bool
) -> None:
    """Each entry is (the last step at which the workers agreed, the number of the next generation)."""
    assert is_distrusted(make_manifest(step, generation=generation), entries) == expected
