"""Credentials in URLs are used, and never shown: not on the terminal, in a log, or in a file of the run.

Shown are `sftp://user:***@host/path` and `https://host/file?***`. Whatever else is secret belongs in the
environment, which nothing here ever prints.
"""

import logging
import re
from typing import Any

HIDDEN = "***"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
PASSWORD = re.compile(r"(://[^/?#@:]*:)[^/?#]*@")
TOKEN = re.compile(r"(https?://)[^/?#@:]*@")  # elsewhere it is a name: abfs://container@account
QUERY = re.compile(r"\?[^?]*=.*")  # signed, as by S3; a ? without = is a pattern of names


def redact(text: str) -> str:
    """The text without passwords, tokens and queries of the URLs in it."""

    def hide(match: re.Match[str]) -> str:
        url = PASSWORD.sub(rf"\1{HIDDEN}@", match[0])
        return QUERY.sub(f"?{HIDDEN}", TOKEN.sub(rf"\1{HIDDEN}@", url))

    return URL.sub(hide, text) if "://" in text else text


def redact_all(nested: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with every text in them redacted."""
    return {key: redact_value(value) for key, value in nested.items()}


def redact_value(value: Any) -> Any:
    if isinstance(value, dict):
        return redact_all(value)
    return redact(value) if isinstance(value, str) else value


class RedactingFormatter(logging.Formatter):
    """Redacts whole lines, arguments and tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
