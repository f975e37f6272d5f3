"""python -m anynode: run torchrun on this node of a job whose nodes may die, join or leave.

    python -m anynode --nnodes MIN:MAX --nproc N --rdzv PLACE --local_addr A -- script.py ...
    python -m anynode --serve HOST:PORT

The second form serves a board, where agents find each other, on a host that outlives the nodes. It needs no
torch.
"""

import sys

from anynode.boards import BoardMemory, Server, parse_endpoints
from anynode.command import Parser, run_node


def serve(words: list[str]) -> None:
    """Serve a board at the address that follows --serve in `words`, until Ctrl-C."""
    parser = Parser("python -m anynode")
    parser.add_argument("--serve", required=True, metavar="HOST:PORT", help="an address of this host")
    text = parser.parse_args(words).serve
    endpoints = parse_endpoints(text)
    if len(endpoints) != 1:
        parser.error(f"--serve is one HOST:PORT, such as 10.0.0.9:29400; got {text!r}")
    ((host, port),) = endpoints
    try:
        Server(host, port, {"post": BoardMemory().post}).serve_forever()
    except KeyboardInterrupt:
        return
    except OSError as error:
        parser.error(f"cannot listen on {text} ({error.strerror}): choose a free port of it")


def main(words: list[str]) -> None:
    if words and words[0].startswith("--serve"):
        serve(words)
    else:
        run_node(words)


if __name__ == "__main__":
    main(sys.argv[1:])
