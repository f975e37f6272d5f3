"""python -m mingpt.launch.elastic --serve HOST:PORT: serve a board, where torchrun's agents find each other.

Run this command on a host that outlives the nodes. It needs no torch.
"""

import sys
from collections.abc import Sequence

from mingpt.base.command import CommandParser, run_command
from mingpt.base.errors import UserError
from mingpt.launch.elastic.boards import BoardMemory, Server, parse_endpoints


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt.launch.elastic", __doc__)
    parser.add_argument("--serve", required=True, metavar="HOST:PORT", help="an address of this host")
    text = parser.parse_args(arguments).serve
    endpoints = parse_endpoints(text)
    if len(endpoints) != 1:
        raise UserError(f"--serve is one HOST:PORT, such as 10.0.0.9:29400; got {text!r}")
    ((host, port),) = endpoints
    try:
        Server(host, port, {"post": BoardMemory().post}).serve_forever()
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        raise UserError(f"cannot listen on {text} ({error.strerror}): choose a free port of it") from None
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
