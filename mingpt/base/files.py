"""File operations for the whole program: atomic writes, retries, and reading JSON that may be damaged.

A worker must not import pydantic before it listens for signals. Code that runs until then must therefore not
import this file.
"""

import codecs
import contextlib
import errno
import functools
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from mingpt.base.errors import UserError

# Each driver of fsspec raises exceptions of its own, from aiohttp, botocore or paramiko for example.
DriverError = Exception
RETRIES_S = (0.5, 2.0)  # pauses between attempts, for the short failures of object stores
PIECE_BYTES = 16 << 20  # of a large file per request; drivers end a request to a URL after a few minutes
LIMITS = {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n"}  # which limit an error's number tells of
MAX_JSON_BYTES = 64 << 20  # per file; a JSON file of a run or a data set has a few thousand
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's contain them, and NULs
# Types of values in JSON, for several packages.
Count = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**63)]
Seconds = Annotated[float, pydantic.Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)]
Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
RunId = Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z]{1,64}$")]
Sync = Literal["nothing", "file", "folder"]
T = TypeVar("T")
make_adapter = functools.cache(pydantic.TypeAdapter)  # making an adapter is slow
log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_file(
    path: str | Path,
    partial: str | Path | None = None,
    sync: Sync = "folder",
    before_rename: Callable[[], bool | None] = lambda: None,
) -> Iterator[io.FileIO]:
    """Open a file for writing, under the name `partial`, and rename it to `path` when the block ends.

    The file is unbuffered: use `write_all`. `partial` is by default `<name>.partial` beside `path`. An error
    before or in the rename removes the partial file, and an earlier file at `path` stays. `sync` tells what
    is made durable: nothing, the file before the rename, or also its folder afterwards. If that last sync
    fails, OSError is raised although the new file is at `path`.

    `before_rename` is called right before the rename: during a long write another job may have taken over the
    folder. It prevents the rename if it raises an error or returns False. After False the partial file stays.
    """
    partial = partial or Path(path).with_name(f"{Path(path).name}.partial")
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
    """Write a whole file, text as UTF-8, by `atomic_file`. Raises OSError or an error of `before_rename`."""
    with atomic_file(path, partial, sync, before_rename) as file:
        write = functools.partial(os.write, file.fileno())
        write_all(write, content.encode() if isinstance(content, str) else content)


def write_all(write: Callable[[memoryview], int | None], content: bytes | memoryview) -> None:
    """Call `write`, which returns how many bytes it took, until it has taken all. Passes on its errors."""
    remaining = memoryview(content)
    while remaining:
        written = write(remaining) or 0
        remaining = remaining[written:]


def fsync_path(path: str | Path) -> None:
    """Make a file durable, or the renames in a folder and removals from it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_quietly(path: str | Path) -> None:
    """Remove a file, if it exists. If that fails, nothing is raised: the file that stays only takes space."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.debug("%s is left behind (%s)", path, error.strerror)


def temporary_folder(prefix: str = "mingpt-") -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder that the end of a `with` block removes. Raises UserError if none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise UserError(
            f"no temporary folder can be made ({error.strerror}): set TMPDIR to a folder with room"
        ) from None


def retry(work: Callable[[], T], pauses_s: Sequence[float], on_failure: Callable[[Exception], None]) -> T:
    """Return the result of `work`; if it raises, call it again after each of `pauses_s` (seconds).

    Before a pause, `on_failure` is called with the error, to log it, or to raise if another attempt is of no
    use. The error of the last attempt is raised.
    """
    for pause_s in pauses_s:
        try:
            return work()
        except DriverError as error:
            on_failure(error)
        time.sleep(pause_s)
    return work()


def reason_of(error: BaseException) -> str:
    """Return what an error says in one line: its `strerror`, if any, else its type and its first line.

    If the process has met a limit that the shell sets, its command is named.
    """
    lines = str(error).splitlines() or [""]
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {lines[0][:300]}"
    limit = LIMITS.get(getattr(error, "errno", 0))
    return f"{reason}, see {limit}" if limit else reason


def decode_text(content: bytes, offset: int = 0) -> str:
    """Return UTF-8 as text, without a byte order mark at its start. `offset` is its place in a file.

    Raises ValueError, which begins with "not UTF-8".
    """
    # UTF-16 without a mark may be valid UTF-8, with a NUL beside each letter.
    if content.startswith(UTF16_MARKS) or 3 * content.count(0) > len(content):
        raise ValueError("not UTF-8, but probably UTF-16 (or 32): convert it by `iconv -f UTF-16 -t UTF-8`")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        byte, place = error.object[error.start], offset + error.start
        raise ValueError(f"not UTF-8: byte 0x{byte:02x} at offset {place:,}") from None


class BadJson(ValueError):
    """Content that is no JSON, or not of the expected form. `place` has the keys to the wrong value."""

    def __init__(self, reason: str, place: tuple[str | int, ...] = ()) -> None:
        self.place = place
        where = ".".join(str(part)[:100] for part in place)
        super().__init__(f"{where}: {reason}" if where else reason)


def read_json(path: Path, form: Any = Any) -> Any:
    """Return the content of a JSON file as `json.loads` gives it, checked by `check_json` against `form`.

    Raises OSError, or BadJson, also for a file of more than MAX_JSON_BYTES.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise BadJson(f"it has more than {MAX_JSON_BYTES:,} bytes")
    value = parse_json(content)
    check_json(value, form)
    return value


def parse_json(content: bytes | str) -> Any:
    """Return what `json.loads` makes of text, or of UTF-8 by `decode_text`. BadJson also for deep nesting."""
    try:
        return json.loads(decode_text(content) if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError, too
        raise BadJson(str(error).splitlines()[0][:200]) from None


def check_json(value: Any, form: type[T]) -> T:
    """Convert a value that `json.loads` gave to `form`, any type that pydantic knows. Raises BadJson.

    Numbers and truth values in `form` are to be strict: otherwise pydantic takes "1" for 1, and 1 for true.
    """
    try:
        return make_adapter(form).validate_python(value)  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        raise bad_json(error) from None


def bad_json(error: pydantic.ValidationError) -> BadJson:
    """Return the BadJson for the first value that pydantic found wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    return BadJson(first["msg"], first["loc"])
