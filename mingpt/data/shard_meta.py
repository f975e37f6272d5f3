"""meta.json: what mingpt.prepare knows of the shards beside it. Checked before anybody uses it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mingpt.errors import UserError

META_FORMAT = 1
NAME = re.compile(r"[^/\0]+\.bin")
SHA256 = re.compile(r"[0-9a-f]{64}")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The checked content of the folder's meta.json; None if there is none.

    Raises UserError if it is damaged, of another format, or says that prepare has not finished.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error).splitlines()[0][:200]) from None
    if not isinstance(meta, dict):
        raise damaged(path, "no JSON object")
    if "format" not in meta:
        raise UserError(
            f"{path} has no format, so prepare did not write it: rename it to read the shards without it"
        )
    if meta["format"] != META_FORMAT:
        raise UserError(
            f"{path} has format {str(meta['format'])[:20]}, and this program reads format {META_FORMAT}: "
            "prepare the data again"
        )
    if meta.get("complete") is False:
        raise UserError(f"{path} says that prepare has not finished: run the same command of it again")
    wrong = first_wrong_value(meta)
    if wrong:
        raise damaged(path, f"{wrong} is missing or not what it should be")
    names = [entry["name"] for entry in meta["files"]]
    if len(set(names)) != len(names):
        raise damaged(path, "it lists a file twice")
    return meta


def damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; prepare the data again")


def first_wrong_value(meta: Mapping[str, Any]) -> str | None:
    """The first value that is missing or of another type, in words; None if all are right."""

    def wrong(values: Mapping[str, Any], rules: Mapping[str, Callable[[Any], bool]], of: str) -> str | None:
        found = (name for name, is_right in rules.items() if name not in values or not is_right(values[name]))
        name = next(found, None)
        return None if name is None else f'"{name}"{of}'

    parts = {"tokenizer": is_object, "documents": is_object, "files": is_full_list}
    problem = wrong(meta, {"complete": is_true, "val_bytes": is_count_or_null, **parts}, "")
    if problem:
        return problem
    vocabulary = {"sha256": is_sha256_or_null, "vocab_size": is_positive, "end_of_text": is_count_or_null}
    problem = wrong(meta["tokenizer"], vocabulary, ' of "tokenizer"')
    problem = problem or wrong(meta["documents"], {"train": is_count, "val": is_count}, ' of "documents"')
    entry_rules = {"name": is_name, "tokens": is_positive, "bytes": is_positive, "sha256": is_sha256}
    for number, entry in enumerate(meta["files"]):
        if problem:
            break
        problem = wrong(entry, entry_rules, f" of file {number}") if is_object(entry) else f"file {number}"
    return problem


def is_true(value: Any) -> bool:
    return value is True


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_full_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # true is an int, too


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_count_or_null(value: Any) -> bool:
    return value is None or is_count(value)


def is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_sha256(value: Any) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def is_sha256_or_null(value: Any) -> bool:
    return value is None or is_sha256(value)
