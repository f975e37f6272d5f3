"""The manifest: a JSON file about a snapshot, with the SHA-256 of each other file and a checksum of itself.

Its field `files` lists the snapshot's other files, and `bytes` and `sha256` are the joint size and hash of
these files. Checksums protect against accidents, but anybody may have written the manifest. Its fields are
therefore checked before they are used: `decode_manifest` returns a checked Manifest or raises an error.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import pydantic

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.files import MAX_JSON_BYTES, BadJson, Count, RunId, Sha256, bad_json, check_json, parse_json
from mingpt.config import Config, check
from mingpt.snapshot.layout import TOKENIZER, are_files_of, file_name

SCHEMA = 4
READS = (3, 4)  # schema 3 lacks `generation`; in it only a snapshot in memory has `after`
MAX_BYTES = 4 << 20  # of a manifest; once it is parsed, each byte may take 30 bytes of memory
CONFIG = pydantic.TypeAdapter(Config)

Name = Annotated[str, pydantic.Field(max_length=200)]
Number = Annotated[int, pydantic.Field(gt=-(2**63), lt=2**63)] | pydantic.FiniteFloat
Scalar = bool | Number | Name | None


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `content`, which messages call `what`.

    Raises CorruptSnapshot if `content` is not JSON, or not an object.
    """
    try:
        parsed = parse_json(content)
    except BadJson as error:
        raise CorruptSnapshot(f"{what} is damaged: {error}") from None
    if not isinstance(parsed, dict):
        raise CorruptSnapshot(f"{what} is damaged: it is no JSON object")
    return parsed


class Part(pydantic.BaseModel):
    """A base class of objects in a manifest. Types are strict ("1" is not 1); unknown fields are kept."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", frozen=True)


class DataFields(Part):
    """What a manifest says about the data that the run trains on, or about the source of an imported model.

    `path` is data.path or the source, with credentials hidden, and `sha256` a hash of all data (zeros: none).
    `files` has a hash of each token shard, by the shard's name, unless there are none or too many.
    """

    path: str
    sha256: Sha256
    files: dict[str, Name] = {}


class TokenizerFields(Part):
    """What a manifest says about the tokenizer. If `kind` is "none", the snapshot has no tokenizer."""

    kind: Name
    vocab_size: int = pydantic.Field(ge=1, lt=2**63)  # number of rows of the model's embedding
    sha256: Sha256 | None = None  # of the tokenizer's bytes; None: no tokenizer, or not recorded


class SoftwareFields(Part):
    """The software and hardware of a run, which may change the bits of its results."""

    __pydantic_extra__: dict[str, Scalar]
    torch: Name
    device: Name
    threads: int = pydantic.Field(ge=1, le=1024)
    dtype: Literal["float32", "bfloat16", "float16"]
    device_type: Name | None = None
    compiled: bool | Name = False
    numerics: Count = 1  # NUMERICS (distributed/device.py) of the program that wrote the snapshot


class FileRecord(Part):
    """A file as the manifest lists it: name, SHA-256 in hex, size in bytes."""

    name: Name
    sha256: Sha256
    bytes: Count


class LossScaleFields(pydantic.BaseModel):
    """The loss scale of a run in float16, which is a power of two.

    `good_steps` counts the steps in a row without overflow since the scale was changed or, at its limit,
    would have been doubled.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    scale: float = pydantic.Field(ge=1, le=2.0**100)
    good_steps: Count

    @pydantic.model_validator(mode="after")
    def check_scale(self) -> "LossScaleFields":
        if math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"the loss scale {self.scale} is no power of two")
        return self


class Manifest(Part):
    """The content of a manifest, checked for types and ranges.

    Before the snapshot is written, `files`, `sha256` and `bytes` have their defaults.
    """

    run: RunId | None = None  # id of the run that wrote the snapshot; None: not recorded
    step: Count
    windows: Count  # the number of training windows (token sequences) that all workers together have read
    # A run sets the next four fields in each manifest; a training loop of your own leaves them out.
    config: dict[str, Any] = {}
    tokenizer: TokenizerFields = TokenizerFields(kind="none", vocab_size=1)
    data: DataFields = DataFields(path="", sha256=64 * "0")
    software: SoftwareFields = SoftwareFields.model_construct(torch="", device="", threads=1, dtype="float32")
    metrics: dict[str, dict[str, Number]] = {}  # kind, such as "val" -> the last record of that kind
    # The last step after which the run was evaluated, and the last step at which the workers were compared
    # and agreed. None: there was no such step, or the step is not recorded.
    evaluated_step: Count | None = None
    replayed_step: Count | None = None
    # Number, in the run, of the generation that wrote the snapshot; 0: not recorded.
    generation: Annotated[int, pydantic.Field(ge=0, lt=2**62)] = 0
    # Numbers of updates that were left out: in all, and in a row up to this step.
    skipped: Annotated[list[Count], pydantic.Field(min_length=2, max_length=2)] = [0, 0]
    loss_scale: LossScaleFields | None = None  # of a run in float16
    after: Count = 0  # the newest step known to be on disk when this snapshot was saved
    files: list[FileRecord] = []  # weights, optimizer's state, tokenizer; the last two may be missing
    sha256: Sha256 = 64 * "0"  # see joint_sha256
    bytes: Count = 0  # of all files

    @pydantic.model_validator(mode="after")
    def check_steps(self) -> "Manifest":
        if self.windows < self.step:
            raise ValueError(f"{self.windows} windows are fewer than {self.step} steps")
        steps = (self.after, self.evaluated_step or 0, self.replayed_step or 0, *self.skipped)
        if max(steps) > self.step:
            raise ValueError(f"it tells of {max(steps)} steps at step {self.step}")
        return self

    @functools.cached_property
    def settings(self) -> Config:
        """The run's configuration. Raises CorruptSnapshot if settings are wrong or contradictory."""
        return parse_config(self.config)

    def with_files(self, records: Sequence[FileRecord]) -> "Manifest":
        """Return a copy of this manifest that lists these files, with their joint size and hash."""
        total = sum(record.bytes for record in records)
        listed = {"files": list(records), "sha256": joint_sha256(records), "bytes": total}
        return self.model_copy(update=listed)


def is_distrusted(manifest: Manifest, distrusted: Iterable[tuple[int, int]]) -> bool:
    """Return whether, by the entries `distrusted`, a snapshot may hold wrong results of a worker.

    If workers are found to compute differently, run.json gets an entry (after, before_generation): the last
    step at which the workers agreed, and the number of the next generation (workers between two restarts).
    What earlier generations saved after that step may be wrong.
    """
    return any(manifest.step > after and manifest.generation < before for after, before in distrusted)


def joint_sha256(records: Sequence[FileRecord]) -> str:
    """Return one SHA-256, in hex, for all files: the hash of their SHA-256 values in hex, joined in order."""
    return hashlib.sha256("".join(record.sha256 for record in records).encode()).hexdigest()


def max_tokenizer_bytes(vocab_size: int) -> int:
    """Return how many bytes a snapshot's tokenizer may have if the embedding has `vocab_size` rows.

    A tokenizer is read, and may be parsed, as a whole. A BPE has some 30 to 150 bytes per token.
    """
    return min(MAX_JSON_BYTES, (1 << 20) + 1000 * vocab_size)


def validation_loss(manifest: Manifest) -> float | None:
    """Return the validation loss at the snapshot's own step; None if `manifest.metrics` does not have it."""
    record = manifest.metrics.get("val", {})
    return record.get("val/loss") if record.get("step") == manifest.step else None


def finite_records(metrics: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the entries of `metrics` in whose records all values are finite numbers.

    `metrics` is {kind: record}, such as {"val": {"step": 100, "val/loss": 1.5}}. JSON has no infinite
    numbers and no NaN.
    """
    return {
        kind: record
        for kind, record in metrics.items()
        if all(isinstance(value, (int, float)) and math.isfinite(value) for value in record.values())
    }


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest's file. Raises UserError if that is more than MAX_BYTES bytes."""
    content = add_checksum({"schema": SCHEMA} | manifest.model_dump(exclude_unset=True))
    if len(content) > MAX_BYTES:
        raise UserError(f"the manifest would have {len(content):,} bytes, more than {MAX_BYTES:,}")
    return content


def add_checksum(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


def decode_manifest(content: bytes) -> Manifest:
    """Return the manifest in `content`, the bytes of its file, after a check of the fields.

    Raises CorruptSnapshot if the manifest is damaged or a field is wrong, and UserError if the schema version
    is unknown.
    """
    fields = parse_object(content, "its manifest")
    if not is_intact(fields, content):
        raise CorruptSnapshot("its manifest is damaged: its checksum does not hold")
    check_schema(fields)
    try:
        manifest = check_json(fields, Manifest)
    except BadJson as error:
        raise CorruptSnapshot(f"its manifest is damaged: {error}") from None
    check_files(manifest)
    manifest.settings  # noqa: B018 - raises CorruptSnapshot
    return manifest


def check_files(manifest: Manifest) -> None:
    """Raise CorruptSnapshot if `manifest.files` cannot be the files of a snapshot of `manifest.step`.

    Also raises CorruptSnapshot if `bytes` or `sha256` is not that of all `files` together, or if the
    tokenizer has more than `max_tokenizer_bytes`. No file is read.
    """
    records, names = manifest.files, [record.name for record in manifest.files]
    if not are_files_of(names, manifest.step):
        raise CorruptSnapshot("its manifest is damaged: files: they are not those of a snapshot of its step")
    if (sum(record.bytes for record in records), joint_sha256(records)) != (manifest.bytes, manifest.sha256):
        raise CorruptSnapshot("its manifest is damaged: bytes or sha256: the files have other values")
    limit = max_tokenizer_bytes(manifest.tokenizer.vocab_size)
    for record in records:
        if record.name == file_name(manifest.step, TOKENIZER) and record.bytes > limit:
            raise CorruptSnapshot(f"its tokenizer has {record.bytes:,} bytes, more than {limit:,}")


def is_intact(manifest: dict[str, Any], content: bytes) -> bool:
    """Return whether `content` is, byte for byte, what `add_checksum` returns for the manifest."""
    try:
        return add_checksum(manifest) == content
    except RecursionError:  # the JSON is nested too deeply
        return False


def check_schema(manifest: dict[str, Any]) -> None:
    """Raise UserError if the schema version is unknown, CorruptSnapshot if it is not a positive integer."""
    schema = manifest.get("schema")
    if type(schema) is not int or schema < 1:
        raise CorruptSnapshot("its manifest is damaged: schema is not a version number")
    if schema not in READS:
        raise UserError(
            f"the snapshot of step {manifest.get('step')!r:.20} has schema version {schema!r:.20}, "
            f"and this program reads versions {READS[0]} and {SCHEMA}: go on with the version that wrote it, "
            "or choose another run_dir"
        )


def parse_config(given: dict[str, Any]) -> Config:
    """Return the configuration in `given`, a manifest's field `config`.

    Settings that this version does not know are ignored, and missing settings get their defaults. Raises
    CorruptSnapshot if a setting has a wrong value, or if settings contradict each other.
    """
    known: dict[str, Any] = {}
    for name, info in Config.__pydantic_fields__.items():  # type: ignore[attr-defined]
        if name not in given:
            continue
        known[name] = given[name]
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
