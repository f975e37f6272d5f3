"""Why does the cluster not start, or who holds the run folder?

    torchrun ... -m mingpt.doctor [CONFIG.yaml] [section.key=value ...]     # started as the run is
    python -m mingpt.doctor --endpoint HOST:PORT                            # when no worker ever starts
    python -m mingpt.doctor --claim RUN_DIR [--release]

The first, with the flags and settings of the run, prints a row per worker and a sentence per fault. Exit code
0: no fault; 1: faults (torchrun does not restart the workers); 2: a mistake on the command line (torchrun
itself exits with 1).

--endpoint looks at the meeting point of the agents (--rdzv_endpoint) from this host alone.

--claim shows the claim that keeps a second job from writing to the same place: a run folder, or a folder or
URL of snapshots. --release drops it: only if its job is gone and nobody can see that; a job that lives
notices it and ends.
"""

import argparse
import logging
import sys

from mingpt.doctor import check_endpoint, show_claims
from mingpt.errors import UserError
from mingpt.redact import RedactingFormatter, redact


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    usage = (
        "%(prog)s [CONFIG.yaml] [section.key=value ...] | --endpoint HOST:PORT | --claim RUN_DIR [--release]"
    )
    parser = argparse.ArgumentParser(
        prog="python -m mingpt.doctor",
        usage=usage,
        description=__doc__,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--endpoint", metavar="HOST:PORT", help="meeting point of the agents; several by commas"
    )
    where = "run folder, or snapshots at a path or URL"
    parser.add_argument("--claim", metavar="RUN_DIR", help=where)
    parser.add_argument("--release", action="store_true", help="drop the claim")
    arguments, settings = parser.parse_known_args()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    if arguments.endpoint is None and arguments.claim is None and not arguments.release:
        from mingpt.doctor.checkup import run_checkup

        run_checkup(settings)
    try:
        if settings or (arguments.release and not arguments.claim):
            raise UserError(f"--endpoint, and --claim with or without --release, stand alone: {parser.usage}")
        is_good, lines = True, list[str]()
        if arguments.endpoint:
            is_good, lines = check_endpoint(arguments.endpoint)
        if arguments.claim:
            lines += show_claims(arguments.claim, arguments.release)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2
    sys.stdout.write(redact("".join(f"{line}\n" for line in lines)))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
