"""URLs: opened by the drivers of fsspec, and shown without their credentials.

Credentials are used, and never shown: not on the terminal, in a log, or in a file of the run. Shown are
`sftp://user:***@host/path` and `https://host/file?***`. Whatever else is secret belongs in the environment,
which nothing here ever prints.
"""

import logging
import re
from typing import Any

from mingpt.base.errors import UserError

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


def redact_all(value: Any) -> Any:
    """A value, or nested dictionaries, with every text in them redacted."""
    if isinstance(value, dict):
        return {key: redact_all(one) for key, one in value.items()}
    return redact(value) if isinstance(value, str) else value


def open_url(where: str, what: str | None = None) -> tuple[Any, str]:
    """The file system of a path or URL, and its path there. Listings are not cached.

    Raises UserError, in which it is called `what`, if its driver is not installed.
    """
    import fsspec  # takes a while, and a worker does not need it before it listens for signals

    options = {"use_listings_cache": False} if "://" in where else {}
    try:
        files, path = fsspec.core.url_to_fs(where, **options)
    except (ImportError, ValueError) as error:
        raise missing_driver(what or where, error) from None
    return files, str(path)


def missing_driver(what: str, error: Exception) -> UserError:
    return UserError(f"{what} needs a driver that is not installed: {error}")


class RedactingFormatter(logging.Formatter):
    """Redacts whole lines, arguments and tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
