"""Open URLs with the drivers of fsspec; hide credentials of URLs in messages, logs and the run's files.

Code that writes a URL to a message, a log line or a file of the run first calls `redact`. URLs are shown as
`sftp://user:***@host/path` and `https://host/file?***`. Other secrets belong in environment variables.
"""

import logging
import re
from typing import Any

from mingpt.base.errors import UserError

HIDDEN = "***"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^\s/?#\"<>]*@)?[^\s'\"<>]+")  # a password may have a '
PASSWORD = re.compile(r"(://[^/?#@:]*:)[^/?#]*@")
TOKEN = re.compile(r"(https?://)[^/?#@:]*@")  # other schemes have a name there: abfs://container@account
QUERY = re.compile(r"\?[^?]*=.*")  # a signed query, as in S3's URLs; a ? without = is part of a pattern


def redact(text: str) -> str:
    """Return text with *** for each password, ?key=value and https://TOKEN@ in its URLs; quotes end these."""

    def hide(match: re.Match[str]) -> str:
        url = PASSWORD.sub(rf"\1{HIDDEN}@", match[0])
        return QUERY.sub(f"?{HIDDEN}", TOKEN.sub(rf"\1{HIDDEN}@", url))

    return URL.sub(hide, text) if "://" in text else text


def redact_all(value: Any) -> Any:
    """Apply `redact` to a string, or to each string value in nested dictionaries; return the result.

    Any other value, such as a list, is returned unchanged.
    """
    if isinstance(value, dict):
        return {key: redact_all(one) for key, one in value.items()}
    return redact(value) if isinstance(value, str) else value


def open_url(where: str, what: str | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of `where`, a path or URL, and the path in that file system.

    The file system caches no listings of a URL. Raises UserError if the URL's driver is not installed or not
    known. The message begins with `what`; if `what` is None, with `where`. A driver that connects at once, as
    that of sftp does, may raise its own errors.
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
    """A log formatter that hides credentials in URLs, also in arguments and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
