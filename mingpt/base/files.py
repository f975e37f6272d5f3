"""File operations for the whole program: atomic writes, retries, and reading JSON that may be damaged.

This file imports pydantic, which takes time. A worker must listen for signals before it imports this file.
"""

import codecs
import contextlib
import functools
import io
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from mingpt.base.errors import UserError, meaning_of

# Each driver of fsspec raises exceptions of its own library, such as aiohttp, botocore or paramiko.
DriverError = Exception
RETRIES_S = (0.5, 2.0)  # pauses between attempts, for the short failures of object stores
PIECE_BYTES = 16 << 20  # per request for a large file; drivers end a request to a URL after a few minutes
MAX_JSON_BYTES = 64 << 20  # per file; a run's or data set's JSON file has a few thousand bytes
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # a mark of UTF-32 is one of these and two NULs
# Types of values in JSON, for several packages.
Count = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**63)]
Seconds = Annotated[float, pydantic.Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)]
Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
RunId = Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z]{1,64}$")]
Sync = Literal["nothing", "file", "folder"]
T = TypeVar("T")
make_adapter = functools.cache(pydantic.TypeAdapter)  # making an adapter is slow
log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)  # a second call with the same text does nothing


@contextlib.contextmanager
def atomic_file(
    path: str | Path,
    partial: str | Path | None = None,
    sync: Sync = "folder",
    before_rename: Callable[[], bool | None] = lambda: None,
) -> Iterator[io.FileIO]:
    """Open a file for writing, under the name `partial`, and rename it to `path` when the block ends.

    The file is unbuffered: use `write_all`. `partial` is by default `<name>.mingpt-partial` beside `path`. An
    error before or during the rename removes the partial file, if possible; a file at `path` stays as it is.

    `sync="file"` calls fsync on the file before the rename. `sync="folder"` also calls `fsync_path` on the
    folder after the rename; an OSError of that call is raised although the new file is at `path`.

    `before_rename` is called right before the rename, for example to check that no other job has taken over
    the folder during a long write. If it raises an error or returns False, the file is not renamed. After
    False, the partial file stays and nothing is raised.
    """
    partial = partial or Path(path).with_name(f"{Path(path).name}.mingpt-partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            yield file
            if sync != "nothing":
                os.fsync(file.fileno())
        may_rename = before_rename()
        if may_rename is False:
            return
        os.replace(partial, path)
    except BaseException:
        remove_quietly(partial)  # on a full disk it would take space from other files
        raise
    if sync == "folder":
        fsync_path(Path(path).parent)


def write_atomic(
    path: str | Path,
    content: bytes | str,
    partial: str | Path | None = None,
    sync: Sync = "folder",
    before_rename: Callable[[], bool | None] = lambda: None,
) -> None:
    """Write `content` to the file `path` with `atomic_file`, which gets the other arguments.

    A str is encoded as UTF-8. Raises OSError, UnicodeEncodeError or an error of `before_rename`.
    """
    with atomic_file(path, partial, sync, before_rename) as file:
        write = functools.partial(os.write, file.fileno())
        write_all(write, content.encode() if isinstance(content, str) else content)


def write_all(write: Callable[[memoryview], int | None], content: bytes | memoryview) -> None:
    """Write all of `content`, by calling `write` until nothing remains.

    `write` may write only a part of what it gets; it returns the number of bytes written, or None for 0.
    """
    remaining = memoryview(content)
    while remaining:
        written = write(remaining) or 0
        remaining = remaining[written:]


def fsync_path(path: str | Path) -> None:
    """Call fsync on `path`: the content of a file, or the renames and removals in a folder, become durable.

    Raises OSError. But if the file system refuses to fsync folders, as some FUSE and CIFS mounts do, and in
    WSL, a folder that cannot be fsynced only causes a log line.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # In WSL, each fsync of a folder on a drive of Windows fails with EIO. Elsewhere EIO is a broken disk.
        is_refused = meaning_of(error) in ("cannot", "forbidden") or "microsoft" in platform.release()
        if not is_refused or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
        warn_once(f"{path} cannot be fsynced ({reason_of(error)}): a power failure may lose new files")
    finally:
        os.close(handle)


def remove_quietly(path: str | Path) -> None:
    """Remove a file, if it exists. An OSError is ignored, and the file then stays."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def temporary_folder(prefix: str = "mingpt-") -> "tempfile.TemporaryDirectory[str]":
    """Make a temporary folder, which is removed at the end of a `with` block.

    Raises UserError if the folder cannot be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise UserError(
            f"no temporary folder can be made ({error.strerror}): set TMPDIR to a folder with room"
        ) from None


def retry(work: Callable[[], T], pauses_s: Sequence[float], on_failure: Callable[[Exception], None]) -> T:
    """Return the result of `work()`. If `work` raises an error, call it again after the next pause.

    `pauses_s` has the pauses, in seconds. Before a pause, `on_failure` is called with the error. `on_failure`
    may log the error, or raise it to prevent another attempt. If the attempt after the last pause fails, its
    error is raised without a call of `on_failure`.
    """
    for pause_s in pauses_s:
        try:
            return work()
        except DriverError as error:
            on_failure(error)
        time.sleep(pause_s)
    return work()


def reason_of(error: BaseException) -> str:
    """Return one line that describes an error: its `strerror`, if any, else its type and its message.

    Only the first line of the message is used, up to 300 characters.
    """
    lines = str(error).splitlines() or [""]
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {lines[0][:300]}"


def decode_text(content: bytes) -> str:
    """Decode UTF-8, and drop a byte order mark at the start.

    Raises ValueError for content that is not UTF-8, if more than a third of the bytes are NULs, and for a tar
    archive whose header has the word "ustar". Except for an archive, the error's message begins with "not
    UTF-8". The message then says that the content is probably UTF-16, or names the first wrong byte and its
    place, not counting the mark.
    """
    if content[257:262] == b"ustar":  # valid UTF-8, if its files are
        raise ValueError("a tar archive: unpack it, and name its files")
    # UTF-16 without a mark may be valid UTF-8, with a NUL beside each letter.
    if content.startswith(UTF16_MARKS) or 3 * content.count(0) > len(content):
        raise ValueError("not UTF-8, but probably UTF-16 (or 32): convert it by `iconv -f UTF-16 -t UTF-8`")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"not UTF-8: byte 0x{byte:02x} at offset {error.start:,}") from None


class BadJson(ValueError):
    """Content that is not JSON, or not JSON of the expected form.

    The argument `place` has the keys and indices that lead to the wrong value; () means the whole content.
    """

    def __init__(self, reason: str, place: tuple[str | int, ...] = ()) -> None:
        where = ".".join(str(part)[:100] for part in place)
        super().__init__(f"{where}: {reason}" if where else reason)


def read_json(path: Path, form: Any = Any) -> Any:
    """Parse a JSON file, check the value with `check_json`, and return the value, not converted to `form`.

    Raises OSError if the file cannot be read, and BadJson if the file is longer than MAX_JSON_BYTES, is not
    JSON or does not fit `form`.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise BadJson(f"it has more than {MAX_JSON_BYTES:,} bytes")
    value = parse_json(content)
    check_json(value, form)
    return value


def parse_json(content: bytes | str) -> Any:
    """Parse JSON, a str or UTF-8 bytes. Raises BadJson if that fails, for example at too deep nesting."""
    try:
        return json.loads(decode_text(content) if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError, too
        raise BadJson(str(error).splitlines()[0][:200]) from None


def check_json(value: Any, form: type[T]) -> T:
    """Check a value from `json.loads` against `form`, and return the value converted to `form`.

    `form` is any type that pydantic knows. Raises BadJson if the value does not fit. Declare numbers and
    booleans in `form` as strict: otherwise pydantic accepts "1" for 1, and 1 for true.
    """
    try:
        return make_adapter(form).validate_python(value)  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        raise bad_json(error) from None


def bad_json(error: pydantic.ValidationError) -> BadJson:
    """Return a BadJson that describes the first wrong value in `error`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return BadJson(first["msg"], first["loc"])
