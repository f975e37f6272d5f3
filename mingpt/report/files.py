"""Small files of a run: written whole, and metrics.jsonl read back."""

import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def replace_file(path: Path, content: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            if isinstance(record["step"], int):
                records.append(record)
        except (ValueError, TypeError, KeyError):
            log.warning("a line of %s that is not a record is ignored: %.60r", path, line)
    return records
