"""The parts that all commands share: a parser, messages and an exit code.

A user's mistake is reported in one sentence that begins with "error:", with exit code 2. This sentence, log
lines and `write_lines` hide the credentials of URLs; the traceback of any other error does not.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from mingpt.base.errors import UserError
from mingpt.base.system import check_working_directory
from mingpt.base.urls import RedactingFormatter, redact


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UserError for a mistake, and takes no abbreviated options."""

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


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command, with logs on stderr; return its exit code, or print a UserError and return 2."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        check_working_directory()
        return command(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, without the credentials of URLs."""
    sys.stdout.write(redact("".join(f"{line}\n" for line in lines)))
    sys.stdout.flush()
