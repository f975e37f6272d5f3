"""Read the bytes at a path or any fsspec URL; if reading fails, an error says why in one sentence.

`read_bytes` caches a remote text, and checks a text against `data.sha256`, if this setting is not null.
`decompressed` reads compressed files, and raises an error if the file ends too early.
"""

import bz2
import contextlib
import functools
import hashlib
import io
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import fsspec

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, reason_of, write_atomic
from mingpt.base.paths import refuse_pipe
from mingpt.base.urls import missing_driver
from mingpt.config import DataConfig

LOCAL = ("file://", "local://", "memory://")
# {pattern of the name of a file that is not a text: the way out}
NO_TEXTS = {
    r"\.(tar(\.\w+)?|tgz|tbz2?|txz|tzst)$": "unpack the archive first",
    r"\.bin$": "token shards are named by their folder, on a local or shared disk",
    r"\.(jsonl|ndjson|parquet|gz|bz2|xz|zst|zip)$": "make token shards of it with `python -m mingpt prepare`",
}
CHUNK_BYTES = 1 << 16  # of a compressed file, decompressed at once
log = logging.getLogger(__name__)


class AbsentFile(UserError):
    """The file does not exist."""


def read_bytes(config: DataConfig) -> bytes:
    """Return the bytes at `config.resolved_path`. A remote text is read from the cache, if the cache has it.

    If data.sha256 is not null, it is compared with the SHA-256 of the text. If a cached text has a different
    SHA-256, the text is downloaded again. If data.sha256 is null, the log says which copy in the cache is
    used. Raises UserError if the text cannot be read, or if a local or downloaded text has a different
    SHA-256.
    """
    path, sha256 = config.resolved_path, config.sha256
    is_remote = "://" in path and not path.startswith(LOCAL)
    with contextlib.suppress(OSError, RuntimeError):  # not in the cache, or there is no cache
        cached = cache_path(path)
        content = cached.read_bytes() if is_remote else None
        if content is not None and has_checksum(content, sha256):
            if sha256 is None:
                made = datetime.fromtimestamp(cached.stat().st_mtime)
                log.info(
                    f"data.path {path} is not downloaded again: the copy of {made:%Y-%m-%d %H:%M} in "
                    f"{cached} is used; remove this file to get the text anew"
                )
            return content
    content = download(path, "data.path")
    if not has_checksum(content, sha256):
        digest = hashlib.sha256(content).hexdigest()
        raise UserError(f"data.path {path} has sha256 {digest}, and data.sha256 asks for {sha256}")
    if is_remote:
        write_cache(path, content)
    return content


def write_cache(url: str, content: bytes) -> None:
    """Write the content of a URL to the cache, for the next start. A failure is only logged."""
    try:
        cached = cache_path(url)
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Durable, because without data.sha256 nothing shows whether the cached file is complete.
        write_atomic(cached, content, cached.with_name(f"{cached.name}.{os.getpid()}"), sync="file")
    except (OSError, RuntimeError) as error:
        log.warning(f"{url} is not cached ({reason_of(error)}): the next start downloads it again")


def cache_path(url: str) -> Path:
    """Return the path of a URL's cache file. Raises RuntimeError if no cache folder is known."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mingpt"
    digest = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}-{url.partition('?')[0].rsplit('/', 1)[-1][:80]}"


def has_checksum(content: bytes, sha256: str | None) -> bool:
    return sha256 is None or hashlib.sha256(content).hexdigest() == sha256.lower()


def download(path: str, setting: str) -> bytes:
    """Return the bytes at a path or URL; the cache is not used.

    Raises AbsentFile if there is no such file, UserError for any other failure; the message begins with
    `setting`.
    """
    refuse_pipe(path, setting)
    with readable(path, f"{setting} "), fsspec.open(path, "rb") as file:
        return bytes(file.read())


@contextlib.contextmanager
def readable(path: str, begin: str = "") -> Iterator[None]:
    """Turn an Exception raised in a `with` block that reads `path` into a UserError of one sentence.

    The UserError is an AbsentFile if the file does not exist. The message begins with `begin` and `path`. A
    UserError raised in the block stays unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise missing_driver(f"{begin}{path}", error) from None
    except DriverError as error:
        reason = failed_request(error) or error
        if isinstance(reason, (FileNotFoundError, NotADirectoryError)):
            raise AbsentFile(f"{begin}{path} does not exist{relative_to(path)}") from None
        raise UserError(f"{begin}{path} cannot be read: {reason_of(reason)}") from None


def relative_to(path: str) -> str:
    """Return, for an error message, where relative paths start; "" if `path` is not relative."""
    return "" if "://" in path or os.path.isabs(path) else f" (relative paths start at {Path.cwd()})"


def failed_request(error: Exception) -> BaseException | None:
    """Return the cause of `error` if the cause is a failed request: no connection, a timeout or a refusal.

    fsspec's HTTP driver raises FileNotFoundError for these failures, too. Returns None for any other cause,
    and for the HTTP statuses 404 and 410, which mean that the file is absent.
    """
    cause = error.__cause__
    is_of_driver = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if is_of_driver and getattr(cause, "status", None) not in (404, 410) else None


def refuse_other_kinds(path: str) -> None:
    """Raise UserError if `path`, a data.path, has the suffix of a file that is not a plain text.

    Such suffixes are those in NO_TEXTS, such as .tar, .gz and .bin. The message says what to do instead.
    """
    for pattern, way_out in NO_TEXTS.items():
        if re.search(pattern, name_of(path)):
            raise UserError(f"data.path {path} is not a text: {way_out}")


def name_of(path: str) -> str:
    """Return a path, or a URL without its query, in lower case."""
    return (path.partition("?")[0] if "://" in path else path).lower()


def decompressed(raw: Any, path: str) -> tuple[IO[bytes], str]:
    """Return (a stream of the content of the open file `raw`, the suffix of the content, such as .txt).

    `path` is the path or URL of `raw`. If its last suffix is in DECODERS, the stream is decompressed, and the
    suffix before the last is returned: .txt for a.txt.gz. Reading the stream raises an error of any type if
    the file is cut or found to be damaged, or if the package for .zst is missing. Raises UserError for .zip.
    """
    stem, suffix = os.path.splitext(name_of(path))
    if suffix == ".zip":
        raise UserError(f"{path} is a zip archive: unpack it, and name its files")
    stream: IO[bytes] = io.BufferedReader(raw)  # a network driver may return fewer bytes than asked for
    if suffix not in DECODERS:
        return stream, suffix
    return io.BufferedReader(PieceStream(decode_frames(stream, DECODERS[suffix]))), os.path.splitext(stem)[1]


def decode_frames(raw: IO[bytes], make_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of all frames (streams, members) of the compressed file `raw`.

    `make_decoder` makes a decoder for one frame. Zeros after a frame are skipped. Raises EOFError if the last
    frame is not complete, and the decoder's error if a frame is found to be damaged. Bytes after a frame that
    begin no other frame raise one of these errors.
    """
    decoder = make_decoder()
    for rest in iter(functools.partial(raw.read, CHUNK_BYTES), b""):
        while rest:
            if decoder.eof:
                rest = rest.lstrip(b"\0")
                decoder = make_decoder() if rest else decoder
                continue
            yield decoder.decompress(rest)
            rest = decoder.unused_data
    if not decoder.eof:
        raise EOFError("the compressed data end too early: copy the file again")


class PieceStream(io.RawIOBase):
    """A raw stream of the bytes that the iterator `pieces` yields."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def zstd_decoder() -> Any:
    from zstandard import ZstdDecompressor  # an ImportError becomes the UserError of `readable`

    return ZstdDecompressor().decompressobj()


gzip_decoder = functools.partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": gzip_decoder,
    ".tgz": gzip_decoder,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": zstd_decoder,
}
