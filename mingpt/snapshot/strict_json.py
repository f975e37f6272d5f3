"""JSON from files that anybody may have written, read without surprises and without much memory."""

import json
import re
from typing import Any

from mingpt.errors import CorruptSnapshot

# Texts, and commas and brackets outside of them. Each may cost 70 bytes once it is parsed; a real file has
# thousands.
MAX_VALUES = 200_000
# A text, closed or not. Nothing is ever tried twice, so the time is linear whatever the content is.
TEXTS = re.compile(rb'"(?:[^"\\]++|\\.?+)*+(?:"|\Z)', re.DOTALL)


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """The object that `content` is. Raises CorruptSnapshot, in whose message it is called `what`.

    Refused are duplicate keys, NaN and infinite numbers, deep nesting, and more than MAX_VALUES values.
    """
    if has_too_many_values(content):
        raise CorruptSnapshot(f"{what} is damaged: it has more than {MAX_VALUES:,} values")
    try:
        text = content.decode()
        parsed = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError, too
        reason = str(error).splitlines()[0][:200]
        raise CorruptSnapshot(f"{what} is damaged: {reason}") from None
    if not isinstance(parsed, dict):
        raise CorruptSnapshot(f"{what} is damaged: it is no JSON object")
    return parsed


def has_too_many_values(content: bytes) -> bool:
    """Whether there are more than MAX_VALUES; copies nothing, and ends as soon as that is known."""
    count, position = 0, 0
    for match in TEXTS.finditer(content):
        count += 1 + sum(content.count(mark, position, match.start()) for mark in (b",", b"[", b"{"))
        position = match.end()
        if count > MAX_VALUES:
            return True
    count += sum(content.count(mark, position) for mark in (b",", b"[", b"{"))
    return count > MAX_VALUES


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key[:100]!r} is there twice")
            seen.add(key)
    return found


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")
