"""The parts that all commands share: a parser, standard streams, messages and an exit code.

A user's mistake is reported in one sentence that begins with "error:"; the exit code is 2. Credentials in
URLs are hidden in this sentence, in log lines and in the output of `write_lines`. They are not hidden in the
traceback of an error that a command does not catch.

A worker imports this file before it listens for signals, so this file imports little.
"""

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from mingpt.base.errors import UserError
from mingpt.base.system import check_working_directory
from mingpt.base.urls import RedactingFormatter, redact


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises UserError for a mistake, and accepts no abbreviated options."""

    def __init__(self, prog: str, description: str | None, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        write_stdout(self.format_help())

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        value = super()._get_values(action, arg_strings)
        if value == [] and action.nargs is None:  # some versions of Python drop the first "--", in --x=-- too
            value = super()._get_values(action, ["--", "--"])
        return value


class StandardStream(io.FileIO):
    """The raw file of stdout or stderr.

    If a write fails, `error` is set, nothing is raised, and the content of the write is lost.
    """

    error: OSError | None = None  # of the last write that failed; None if no write has failed

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.error = error
            return len(content)


def open_streams() -> None:
    """Replace stdout and stderr by streams whose writes raise no OSError; see `write_stdout`.

    Characters that a stream's encoding lacks are written as escapes, such as \\u6d77. A closed stdin is
    replaced by an empty stream. A stdout or stderr that a notebook or a test has replaced stays as it is.
    """
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open as long as the process
    for name, stream in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if getattr(sys, name) is not stream:
            continue  # a notebook or a test has replaced it
        # A closed stream's descriptor is free, and the next file to be opened would get it.
        descriptor = stream.fileno() if stream else os.open(os.devnull, os.O_RDONLY)
        os.set_blocking(descriptor, True)
        buffer = io.BufferedWriter(StandardStream(descriptor, "w", closefd=False))
        encoding = stream and stream.encoding
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True))


def write_stdout(text: str) -> None:
    """Write text to stdout, and flush it.

    After `open_streams`, raises SystemExit(1) if the process that reads stdout has exited, as `head` does
    after some lines, and UserError if stdout is closed or another write to it has failed.
    """
    sys.stdout.write(text)
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = getattr(raw, "error", None)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(1)
    if error:
        raise UserError(f"standard output cannot be written: {error.strerror}")


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run `command(arguments)`; return its exit code: 2 after a UserError, 130 after Ctrl-C.

    Log lines, and the message of a UserError, are written to stderr. Any other exception is raised. Replaces
    stdout and stderr: see `open_streams`.
    """
    open_streams()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        check_working_directory()
        return command(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, with credentials in URLs hidden. Raises the exceptions of `write_stdout`."""
    write_stdout(redact("".join(f"{line}\n" for line in lines)))
