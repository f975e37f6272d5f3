"""What every room does with files: write one whole or not at all, try again, read JSON that may be damaged.

A worker imports no pydantic before it listens for signals, so what runs until then must not import this file.
"""

import contextlib
import functools
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic

# What a driver of fsspec may raise: each has exceptions of its own, of aiohttp, botocore or paramiko say.
DriverError = Exception
RETRIES_S = (0.5, 2.0)  # pauses between attempts, for the short failures of object stores
PIECE_BYTES = 16 << 20  # of a large file at once; drivers give a request to a URL a few minutes
MAX_JSON_BYTES = 64 << 20  # of a file; a run's or a data set's takes a few thousand
MAX_JSON_VALUES = 200_000  # each may cost 70 bytes once it is parsed; a real file has thousands
# Values in JSON that several rooms read.
Count = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**63)]
Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
Sync = Literal["nothing", "file", "folder"]
T = TypeVar("T")
make_adapter = functools.cache(pydantic.TypeAdapter)  # which takes long
log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_file(
    path: str | Path,
    partial: str | Path | None = None,
    sync: Sync = "folder",
    before_rename: Callable[[], bool | None] = lambda: None,
) -> Iterator[io.FileIO]:
    """Open a file for writing that appears at `path` when the block ends, or not at all.

    Until then it is called `partial`, by default `<name>.partial` beside it. An error removes it; the file
    of before is still there. `sync` says what is made durable: nothing, the file before it gets its name, or
    also its folder afterwards. `before_rename` is called right before the file gets its name, since storage
    may have hung for long. It raises an error or returns False if the file must not appear any more; after
    False nothing is removed either, because the folder is another job's.
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
        remove_quietly(partial)  # on a full disk it would take the room of others
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
    """Write a whole file as `atomic_file` does; text is written as UTF-8. Raises OSError."""
    with atomic_file(path, partial, sync, before_rename) as file:
        write = functools.partial(os.write, file.fileno())
        write_all(write, content.encode() if isinstance(content, str) else content)


def write_all(write: Callable[[memoryview], int | None], content: bytes | memoryview) -> None:
    """Call `write` until it has taken all bytes; on a disk that fills up it takes a part before it raises."""
    remaining = memoryview(content)
    while remaining:
        written = write(remaining) or 0
        remaining = remaining[written:]


def fsync_path(path: str | Path) -> None:
    """Make a file durable, or the renames and removals in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_quietly(path: str | Path) -> None:
    """Remove a file that may not be there. A failure is no error: the file only takes room."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.debug("%s is left behind (%s)", path, error.strerror)


def retry(work: Callable[[], T], pauses_s: Sequence[float], on_failure: Callable[[Exception], None]) -> T:
    """Return the result of `work`, which is tried again after each of `pauses_s` seconds.

    Before a pause `on_failure` gets the error, for a line in the log; it raises if another attempt is of no
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
    """Return why a file cannot be read or written, in a few words and one line."""
    lines = str(error).splitlines() or [""]
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {lines[0][:300]}"


class BadJson(ValueError):
    """Content that is no JSON, or not of the expected form. `place` leads to the value that is wrong."""

    def __init__(self, reason: str, place: tuple[str | int, ...] = ()) -> None:
        self.place = place
        where = ".".join(str(part)[:100] for part in place)
        super().__init__(f"{where}: {reason}" if where else reason)


def read_json(path: Path, form: Any = Any) -> Any:
    """Return the plain value of a JSON file, which `check_json` has checked against `form`.

    Raises OSError, and BadJson also for a file of more than MAX_JSON_BYTES.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise BadJson(f"it has more than {MAX_JSON_BYTES:,} bytes")
    value = parse_json(content)
    check_json(value, form)
    return value


def parse_json(content: bytes | str, strict: bool = False) -> Any:
    """Return the plain value of JSON in UTF-8. Raises BadJson, also for deep nesting.

    With `strict`, for content that anybody may have written, duplicate keys, NaN, infinite numbers and more
    than MAX_JSON_VALUES values are refused.
    """
    hooks: dict[str, Any] = {}
    try:
        text = content.decode() if isinstance(content, bytes) else content
        if strict:
            if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:  # those within texts count, too
                raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
            hooks = {"object_pairs_hook": unique_keys, "parse_constant": refuse_constant}
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError, too
        raise BadJson(str(error).splitlines()[0][:200]) from None


def check_json(value: Any, form: type[T]) -> T:
    """Return a plain value from JSON as `form`, any type that pydantic knows. Raises BadJson.

    Numbers and truth values in `form` are to be strict: pydantic takes "1" for 1 and 1 for true otherwise.
    """
    try:
        return make_adapter(form).validate_python(value)  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        raise bad_json(error) from None


def bad_json(error: pydantic.ValidationError) -> BadJson:
    """Return which value is wrong first, and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    return BadJson(first["msg"], first["loc"])


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:100]!r} is there twice")
        found[key] = value
    return found


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")
