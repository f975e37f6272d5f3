"""The manifest: what a tensor file holds, with its size and SHA-256 and a checksum of the manifest itself."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load
from torch import Tensor

from mingpt.errors import CorruptSnapshot, UserError

SCHEMA = 1
FILE_NAME = re.compile(r"step_(\d{8,})\.(json|safetensors)")


def file_name(step: int, kind: str) -> str:
    """kind is "json" for the manifest and "safetensors" for the tensors."""
    return f"step_{step:08d}.{kind}"


@dataclass(frozen=True)
class Snapshot:
    """A manifest and the bytes of the tensor file, whose checksums hold."""

    manifest: dict[str, Any]
    content: bytes

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        named = load(self.content).items()
        return {name.removeprefix(prefix): tensor for name, tensor in named if name.startswith(prefix)}


def encode_manifest(fields: dict[str, Any], sha256: str, size: int) -> bytes:
    """The manifest's bytes for a tensor file with this SHA-256 and this size in bytes."""
    body = {"schema": SCHEMA, **fields, "sha256": sha256, "bytes": size}
    return add_checksum(body)


def add_checksum(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


def decode_manifest(content: bytes) -> dict[str, Any]:
    """The inverse of `encode_manifest`. Raises CorruptSnapshot, or UserError for another schema version."""
    try:
        manifest = json.loads(content)
        intact = add_checksum(manifest) == content
    except (ValueError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise CorruptSnapshot("its manifest is damaged")
    if manifest["schema"] != SCHEMA:
        raise UserError(
            f"the snapshot of step {manifest['step']} has schema version {manifest['schema']}, "
            f"and this program reads version {SCHEMA}"
        )
    return dict(manifest)
