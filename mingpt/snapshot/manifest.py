"""The manifest: JSON about a snapshot, with the SHA-256 of its tensor files and a checksum of itself.

It lists the tensor `files`; `bytes` and `sha256` are computed over all of them. Checksums protect against
accidents, but anybody may have written the manifest. Every field is therefore checked before it is used.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.files import BadJson, Count, Sha256, bad_json, check_json, parse_json
from mingpt.config import Config, check
from mingpt.snapshot.layout import are_tensor_files

SCHEMA = 2
MAX_BYTES = 4 << 20  # of a manifest, of which three copies exist while it is checked
CONFIG = pydantic.TypeAdapter(Config)

Name = Annotated[str, pydantic.Field(max_length=200)]
Number = Annotated[int, pydantic.Field(gt=-(2**63), lt=2**63)] | pydantic.FiniteFloat
Scalar = bool | Number | Name | None


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `content`. CorruptSnapshot if `content`, called `what`, is no object."""
    try:
        parsed = parse_json(content)
    except BadJson as error:
        raise CorruptSnapshot(f"{what} is damaged: {error}") from None
    if not isinstance(parsed, dict):
        raise CorruptSnapshot(f"{what} is damaged: it is no JSON object")
    return parsed


class Part(pydantic.BaseModel):
    """A base class for objects in a manifest. Types are strict: "1" is not 1. Other fields are allowed."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")


class DataFields(Part):
    """The text or token shards that were trained on; `files` has the shards' fingerprints by name."""

    path: str
    sha256: Sha256
    files: dict[str, Name] = {}


class TokenizerFields(Part):
    """The tokenizer, whose bytes are in `vocabulary` or the tensor `tokenizer`; none if `kind` is "none"."""

    kind: Name
    vocab_size: int = pydantic.Field(ge=1, lt=2**63)


class SoftwareFields(Part):
    """The facts, besides the configuration, on which the bits of a run's results depend."""

    __pydantic_extra__: dict[str, Scalar]
    torch: Name
    device: Name
    threads: int = pydantic.Field(ge=1, le=1024)
    dtype: Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class FileRecord:
    """A tensor file as the manifest lists it: name, SHA-256 in hex, size in bytes."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(strict=False)  # take a JSON object for it
    name: Name
    sha256: Sha256
    bytes: Count


class ShardFields(pydantic.BaseModel):
    """Tells which part of a sharded state a memory snapshot has: a rank's rows, maybe also whole tensors."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    rank: Count
    workers: int = pydantic.Field(ge=1, lt=2**31)
    weights: bool  # whether weights are sharded, too, not the optimizer's state alone
    generation: str = pydantic.Field(pattern="^[0-9a-f]{32}$")  # random, the same in all parts

    @pydantic.model_validator(mode="after")
    def check_rank(self) -> "ShardFields":
        if self.rank >= self.workers:
            raise ValueError(f"there is no rank {self.rank} of {self.workers} workers")
        return self


class LossScaleFields(pydantic.BaseModel):
    """The loss scale of a run in float16: a power of two, and the steps without overflow at it so far."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    scale: float = pydantic.Field(ge=1, le=2.0**100)
    good_steps: Count

    @pydantic.model_validator(mode="after")
    def check_scale(self) -> "LossScaleFields":
        if math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"the loss scale {self.scale} is no power of two")
        return self


class Fields(Part):
    """The fields of a manifest, with types and ranges."""

    step: Count
    windows: Count
    config: dict[str, Any]
    vocabulary: str
    tokenizer: TokenizerFields | None = None
    data: DataFields
    software: SoftwareFields
    audit: Sha256  # a hash over all tokens that were trained on
    metrics: dict[str, dict[str, Number]]
    sha256: Sha256
    bytes: Count
    files: list[FileRecord]
    after: Count = 0  # in a memory snapshot: the newest step on disk when it was saved
    shard: ShardFields | None = None  # in a memory snapshot of a part
    replayed_step: Count | None = None  # the last step at which the workers were compared and agreed
    discarded_after: list[Count] = []  # see is_suspect
    # Numbers of updates that were left out: in all, and in a row up to this step.
    skipped: Annotated[list[Count], pydantic.Field(min_length=2, max_length=2)] = [0, 0]
    loss_scale: LossScaleFields | None = None  # of a run in float16


def is_suspect(manifest: Mapping[str, Any], discarded_after: Sequence[int]) -> bool:
    """Return whether a snapshot may hold wrong results of a worker; `discarded_after` is the run's list.

    Each time that workers compute differently, the last trusted step is added to the run's list. A manifest
    holds the list as of its writing. A snapshot is suspect if it is past a step that was added later.
    """
    later = discarded_after[len(manifest.get("discarded_after", [])) :]
    return any(manifest["step"] > step for step in later)


def file_records(manifest: dict[str, Any]) -> list[FileRecord]:
    """Return the records of the tensor files of a valid manifest, weights first."""
    return check_json(manifest["files"], list[FileRecord])


def joint_sha256(records: Sequence[FileRecord]) -> str:
    """Return the SHA-256 over the files' SHA-256 values, joined as hex digits."""
    return hashlib.sha256("".join(record.sha256 for record in records).encode()).hexdigest()


def encode_manifest(fields: dict[str, Any], records: Sequence[FileRecord]) -> bytes:
    """Return a manifest's bytes, without records of metrics that are not finite. UserError past MAX_BYTES."""
    body = {
        "schema": SCHEMA,
        **fields,
        "files": [asdict(record) for record in records],
        "sha256": joint_sha256(records),
        "bytes": sum(record.bytes for record in records),
    }
    if "metrics" in body:
        body["metrics"] = {kind: record for kind, record in body["metrics"].items() if is_finite(record)}
    content = add_checksum(body)
    if len(content) > MAX_BYTES:
        raise UserError(f"the manifest would have {len(content):,} bytes, more than {MAX_BYTES:,}")
    return content


def is_finite(record: dict[str, Any]) -> bool:
    """Return whether all values of a record of metrics are finite numbers, as JSON needs."""
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in record.values())


def add_checksum(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


def decode_manifest(content: bytes) -> dict[str, Any]:
    """Return the checked manifest in `content`. Raises CorruptSnapshot, or UserError for another schema."""
    manifest = parse_object(content, "its manifest")
    if not is_intact(manifest, content):
        raise CorruptSnapshot("its manifest is damaged: its checksum does not hold")
    check_schema(manifest)
    try:
        check_json(manifest, Fields)
    except BadJson as error:
        raise CorruptSnapshot(f"its manifest is damaged: {error}") from None
    if manifest["windows"] < manifest["step"]:
        windows, step = manifest["windows"], manifest["step"]
        raise CorruptSnapshot(f"its manifest is damaged: {windows} windows are fewer than {step} steps")
    check_files(manifest)
    read_config(manifest)
    return manifest


def check_files(manifest: dict[str, Any]) -> None:
    """Raise CorruptSnapshot unless the names in `files` are those of a snapshot of the manifest's step.

    `bytes` and `sha256` must also be those of all `files` together. No file is read. Raises UserError for
    files in parts, which earlier versions wrote.
    """
    records = file_records(manifest)
    if any("-of-" in record.name for record in records):
        raise UserError(
            f"the snapshot of step {manifest['step']} has files in parts, as earlier versions wrote them "
            "past 4 GiB: resume it with such a version"
        )
    if not are_tensor_files([record.name for record in records], manifest["step"]):
        raise CorruptSnapshot("its manifest is damaged: files: they are not those of a snapshot of its step")
    found = sum(record.bytes for record in records), joint_sha256(records)
    if found != (manifest["bytes"], manifest["sha256"]):
        raise CorruptSnapshot("its manifest is damaged: bytes or sha256: the files have others")


def is_intact(manifest: dict[str, Any], content: bytes) -> bool:
    """Return whether `content` equals the result of `add_checksum` for the manifest, byte by byte."""
    try:
        return add_checksum(manifest) == content
    except RecursionError:  # it is nested deeply
        return False


def check_schema(manifest: dict[str, Any]) -> None:
    """Raise UserError for another schema, CorruptSnapshot if `schema` is missing or no version number."""
    schema = manifest.get("schema")
    if type(schema) is not int or schema < 1:
        raise CorruptSnapshot("its manifest is damaged: schema is not a version number")
    if schema != SCHEMA:
        raise UserError(
            f"the snapshot of step {manifest.get('step')!r:.20} has schema version {schema!r:.20}, "
            f"and this program reads version {SCHEMA}"
        )


def read_config(manifest: dict[str, Any]) -> Config:
    """Return a manifest's configuration. Raises CorruptSnapshot if a setting has a wrong value.

    Settings that this version does not know are ignored, and missing settings have their defaults.
    """
    known: dict[str, Any] = {}
    for name, info in Config.__pydantic_fields__.items():  # type: ignore[attr-defined]
        if name not in manifest["config"]:
            continue
        known[name] = manifest["config"][name]
        settings = getattr(info.annotation, "__pydantic_fields__", None)
        if settings and isinstance(known[name], dict):
            known[name] = {key: value for key, value in known[name].items() if key in settings}
    try:
        # Paths may hold bytes that are not UTF-8, which is no fault: the paths are not used.
        text = json.dumps(known, ensure_ascii=False).encode(errors="replace")
        config = CONFIG.validate_json(text, strict=True)
        check(config)
    except (pydantic.ValidationError, UserError) as error:
        reason = str(bad_json(error) if isinstance(error, pydantic.ValidationError) else error)
        raise CorruptSnapshot(f"its manifest is damaged: config: {reason}") from None
    return config
