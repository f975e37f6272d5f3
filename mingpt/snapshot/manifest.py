"""The manifest: what a tensor file holds, with its size and SHA-256 and a checksum of the manifest itself.

A checksum protects against accidents, not against a file from elsewhere. So every field is checked as well
before it is used.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from torch import Tensor

from mingpt.config import Config, check
from mingpt.errors import CorruptSnapshot, UserError
from mingpt.snapshot.strict_json import parse_object
from mingpt.snapshot.tensors import tensor_views

SCHEMA = 1
MAX_BYTES = 4 << 20  # of a manifest, which is held three times while it is checked
PIECE = 1 << 16  # characters
FILE_NAME = re.compile(r"step_([0-9]{8,19})\.(json|safetensors)")
QUARANTINED = re.compile(r"damaged-[0-9]+-step_([0-9]{8,19})\.json")
CONFIG = pydantic.TypeAdapter(Config)

Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, pydantic.Field(max_length=200)]
Number = Annotated[int, pydantic.Field(gt=-(2**63), lt=2**63)] | pydantic.FiniteFloat
Scalar = bool | Number | Name | None


class DataFields(pydantic.BaseModel):
    """The text, or the token shards, that were trained on."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    path: str
    sha256: Sha256
    files: dict[str, Name] = {}


class TokenizerFields(pydantic.BaseModel):
    """The tokenizer: characters in `vocabulary`, a tokenizer.json among the tensors, or none."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    kind: Name
    vocab_size: int = pydantic.Field(ge=1, lt=2**63)


class SoftwareFields(pydantic.BaseModel):
    """What the bits depend on besides the configuration."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Scalar]
    torch: Name
    device: Name
    threads: int = pydantic.Field(ge=1, le=1024)
    dtype: Literal["float32", "bfloat16", "float16"]


class RecordFields(pydantic.BaseModel):
    """A record of metrics.jsonl."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Number]
    step: Count


class Fields(pydantic.BaseModel):
    """Types and ranges of a manifest's fields; others may be there. Neither `true` nor "1" is 1."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    step: Count
    windows: Count
    config: dict[str, Any]
    vocabulary: str
    tokenizer: TokenizerFields | None = None
    data: DataFields
    software: SoftwareFields
    audit: Sha256
    metrics: dict[str, dict[str, Number]]
    sha256: Sha256
    bytes: Count
    unwritten: list[RecordFields] = []  # that metrics.jsonl had no room for
    after: Count = 0  # of a snapshot in memory: the newest step on disk at its time


@dataclass(frozen=True)
class Snapshot:
    """A manifest and the bytes of the tensor file, whose checksums hold."""

    manifest: dict[str, Any]
    content: bytes

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return read_config(self.manifest)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it; they share the memory of `content`."""
        return tensor_views(self.content, prefix)


def file_name(step: int, kind: str) -> str:
    """kind is "json" for the manifest and "safetensors" for the tensors."""
    return f"step_{step:08d}.{kind}"


def step_of(name: str, kind: str | None = None) -> int | None:
    """The step whose file (of this kind, or of either) has this name; None if it is another name."""
    match = FILE_NAME.fullmatch(name)
    if not match or kind not in (None, match[2]):
        return None
    step = int(match[1])
    return step if name == file_name(step, match[2]) else None


def encode_manifest(fields: dict[str, Any], sha256: str, size: int) -> bytes:
    """The manifest's bytes for a tensor file with this SHA-256 and size. Raises UserError if too large."""
    body = {"schema": SCHEMA, **fields, "sha256": sha256, "bytes": size}
    if "metrics" in body:
        body["metrics"] = {kind: record for kind, record in body["metrics"].items() if is_finite(record)}
    content = add_checksum(body)
    if len(content) > MAX_BYTES:
        raise UserError(f"the manifest would have {len(content):,} bytes, more than {MAX_BYTES:,}")
    return content


def is_finite(record: dict[str, Any]) -> bool:
    """Whether JSON can hold a record of metrics: it has no infinite numbers and no NaN."""
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in record.values())


def add_checksum(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


def decode_manifest(content: bytes) -> dict[str, Any]:
    """The inverse of `encode_manifest`. Raises CorruptSnapshot, or UserError for another schema version."""
    if len(content) > MAX_BYTES:
        raise CorruptSnapshot(f"its manifest has {len(content):,} bytes, more than {MAX_BYTES:,}")
    manifest = parse_object(content, "its manifest")
    if not is_intact(manifest, content):
        raise CorruptSnapshot("its manifest is damaged: its checksum does not hold")
    check_schema(manifest)
    try:
        Fields.model_validate(manifest)
    except pydantic.ValidationError as error:
        raise CorruptSnapshot(f"its manifest is damaged: {first_error(error)}") from None
    if manifest["windows"] < manifest["step"]:
        windows, step = manifest["windows"], manifest["step"]
        raise CorruptSnapshot(f"its manifest is damaged: {windows} windows are fewer than {step} steps")
    if re.search("[\ud800-\udfff]", manifest["vocabulary"]):
        raise CorruptSnapshot("its manifest is damaged: vocabulary: half a character")
    read_config(manifest)
    return manifest


def is_intact(manifest: dict[str, Any], content: bytes) -> bool:
    """Whether `content` is add_checksum(manifest), piece by piece, as a manifest may be large."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest, position = hashlib.sha256(), 0
    try:
        for piece in json_pieces(body, sort_keys=True):
            digest.update(piece)
        for piece in json_pieces(body | {"checksum": digest.hexdigest()}, indent=1):
            if content[position : position + len(piece)] != piece:
                return False
            position += len(piece)
    except RecursionError:
        return False
    return content[position:] == b"\n"


def json_pieces(value: dict[str, Any], **options: Any) -> Iterator[bytes]:
    """What json.dumps(value, **options) gives, in pieces."""
    for text in json.JSONEncoder(**options).iterencode(value):
        for begin in range(0, len(text), PIECE):
            yield text[begin : begin + PIECE].encode()


def check_schema(manifest: dict[str, Any]) -> None:
    """A later version may have other fields, and its snapshots are left alone: that is a UserError."""
    schema, step = manifest.get("schema"), manifest.get("step")
    if type(schema) is not int or schema < 1:
        raise CorruptSnapshot("its manifest is damaged: schema is not a version number")
    if schema != SCHEMA and type(step) is int and step >= 0:
        raise UserError(
            f"the snapshot of step {step} has schema version {schema}, "
            f"and this program reads version {SCHEMA}"
        )
    if schema != SCHEMA:
        raise CorruptSnapshot(f"its manifest is damaged: schema is {schema} and step is not a number")


def read_config(manifest: dict[str, Any]) -> Config:
    """The configuration that a manifest records. Raises CorruptSnapshot.

    Settings that this version does not know are ignored, and those that are missing have their defaults.
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
        # Paths may hold bytes that are no text; nothing but paths does, and they are not used.
        text = json.dumps(known, ensure_ascii=False).encode(errors="replace")
        config = CONFIG.validate_json(text, strict=True)
        check(config)
    except (pydantic.ValidationError, UserError) as error:
        reason = first_error(error) if isinstance(error, pydantic.ValidationError) else str(error)
        raise CorruptSnapshot(f"its manifest is damaged: config: {reason}") from None
    return config


def first_error(error: pydantic.ValidationError) -> str:
    """Which field is wrong, and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:100] for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
