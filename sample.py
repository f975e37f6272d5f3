"""Generate text with a trained model: python sample.py out/default --prompt "..." --tokens 300."""

import sys

from mingpt.base.command import run_command
from mingpt.tools.sample import main

if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
