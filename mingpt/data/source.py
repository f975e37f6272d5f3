"""The bytes of the text: from a path or any fsspec URL, cached and checked against a checksum."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec

from mingpt.config import DataConfig
from mingpt.errors import UserError

log = logging.getLogger(__name__)
LOCAL = ("file://", "local://", "memory://")
# Files that mingpt.prepare reads and training does not.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class AbsentFile(UserError):
    """There is no such file."""


def read_bytes(config: DataConfig) -> bytes:
    """The text's bytes. Raises UserError if they cannot be read or have another sha256 than `data.sha256`."""
    return read_cached(config.path, config.sha256, "data.path", "data.sha256")


def read_cached(path: str, sha256: str | None, setting: str, checksum_setting: str) -> bytes:
    """The bytes at a path or URL; remote files are cached.

    Raises UserError, which begins with `setting`, if they cannot be read or have another checksum than
    `sha256`, which `checksum_setting` asks for; None accepts any.
    """
    remote = "://" in path and not path.startswith(LOCAL)
    content = read_cache(path) if remote else None
    if content is not None and has_checksum(content, sha256):
        return content  # otherwise the cached file is outdated or incomplete: download it again
    content = download(path, setting)
    if not has_checksum(content, sha256):
        digest = hashlib.sha256(content).hexdigest()
        raise UserError(f"{setting} {path} has sha256 {digest}, and {checksum_setting} asks for {sha256}")
    if remote:
        write_cache(path, content)
    return content


def read_cache(url: str) -> bytes | None:
    """The text as it was downloaded before; None if it was not, or cannot be read."""
    try:
        return cache_path(url).read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        log.warning("the cached text of %s cannot be read (%s) and is downloaded again", url, error)
        return None


def write_cache(url: str, content: bytes) -> None:
    """Keep a text for the next start; where that does not work, one line says so."""
    try:
        cached = cache_path(url)
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # without data.sha256 nothing tells whether it is complete
            partial.replace(cached)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()  # on a full disk it would take the room of others
            raise
    except (OSError, RuntimeError) as error:
        log.warning("%s is not cached (%s): the next start downloads it again", url, error)


def cache_path(url: str) -> Path:
    """Raises RuntimeError if there is neither XDG_CACHE_HOME nor a home folder."""
    place = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(place) if place else Path.home() / ".cache") / "mingpt"
    digest = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}-{url.partition('?')[0].rsplit('/', 1)[-1][:80]}"


def has_checksum(content: bytes, sha256: str | None) -> bool:
    return sha256 is None or hashlib.sha256(content).hexdigest() == sha256.lower()


def download(path: str, setting: str) -> bytes:
    """The bytes at a path or URL. Raises UserError, naming the package if its driver is not installed."""
    with readable(path, f"{setting} "), fsspec.open(path, "rb") as file:
        return bytes(file.read())


@contextlib.contextmanager
def readable(path: str, begin: str = "") -> Iterator[None]:
    """Whatever a driver raises becomes a UserError that begins with `begin` and the path."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{begin}{path} needs a driver that is not installed: {error}") from None
    except Exception as error:  # each driver raises exceptions of its own
        reason = failed_request(error) or error
        if isinstance(reason, (FileNotFoundError, NotADirectoryError)):
            raise AbsentFile(f"{begin}{path} does not exist{relative_to(path)}") from None
        line = str(reason).splitlines()[0] if str(reason) else ""
        raise UserError(f"{begin}{path} cannot be read: {type(reason).__name__}: {line}") from None


def relative_to(path: str) -> str:
    """Where a relative path starts, for an error message."""
    return "" if "://" in path or os.path.isabs(path) else f" (relative paths start at {Path.cwd()})"


def failed_request(error: Exception) -> BaseException | None:
    """What fsspec's HTTP driver hides behind FileNotFoundError: no connection, a timeout, a refusal."""
    cause = error.__cause__
    is_of_driver = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if is_of_driver and getattr(cause, "status", None) not in (404, 410) else None


def hint_to_prepare(path: str) -> str:
    """How to use a file that mingpt.prepare reads and training does not, for an error message; else ""."""
    name = path.partition("?")[0] if "://" in path else path
    is_for_prepare = name.lower().endswith((*KINDS, *COMPRESSED))
    return ": make token shards of it with `python -m mingpt.prepare`" if is_for_prepare else ""
