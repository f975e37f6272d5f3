"""python -m mingpt.elastic --serve HOST:PORT: a board on a host that outlives the nodes. Needs no torch."""

import argparse
import sys

from mingpt.elastic.boards import parse_rdzv, serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mingpt.elastic", description=__doc__)
    parser.add_argument("--serve", required=True, metavar="HOST:PORT", help="an address of this host")
    text = parser.parse_args().serve
    try:
        endpoints = parse_rdzv(text)
    except ValueError:
        endpoints = []
    if not isinstance(endpoints, list) or len(endpoints) != 1:
        sys.exit(fail(f"--serve is one HOST:PORT, such as 10.0.0.9:29400; got {text!r}"))
    endpoint = endpoints[0]
    try:
        serve(endpoint.host, endpoint.port)
    except KeyboardInterrupt:
        sys.exit(0)
    except OSError as error:
        sys.exit(fail(f"cannot listen on {endpoint} ({error.strerror}): choose a free port of this host"))


def fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


if __name__ == "__main__":
    main()
