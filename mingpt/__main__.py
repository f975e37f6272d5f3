"""The commands beside train.py.

python -m mingpt                             # lists the commands
python -m mingpt COMMAND [arguments]         # runs a command; COMMAND --help explains it
torchrun ... -m mingpt doctor [settings]     # every worker runs the doctor, a check-up of the cluster
"""

import importlib
import sys
from collections.abc import Sequence

from mingpt.base.command import CommandParser, run_command

# Command: (the module whose `main` takes the arguments and returns the exit code, what the command does)
COMMANDS = {
    "verify": ("tools.verify", "prove on this machine that kills and other numbers of workers change no bit"),
    "compare": ("tools.compare", "say which run is best, and where and in what runs differ"),
    "doctor": ("tools.doctor", "say why a cluster does not start, or which of its nodes is slow"),
    "plan": ("tools.plan", "say what a run needs, before it is started, and what fits"),
    "prepare": ("tools.prepare", "encode text into token shards"),
    "snapshots": ("tools.snapshots", "list the snapshots of a run: step, validation loss, size, state"),
    "timeline": ("tools.timeline", "draw what the time of a run went to"),
    "sample": ("tools.sample", "generate text with a trained model; sample.py is the same program"),
    "import": ("tools.import_model", "turn a model of Hugging Face's into a run, to train or sample it"),
    "export": ("tools.export", "write a run as a folder in Hugging Face's format"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first of `arguments` names; return its exit code. `doctor` ends the process.

    Without arguments, or with --help first, print the list of commands and raise SystemExit(0). --help after
    a command does the same with the help of this command. Raises UserError for a user's mistake.
    """
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    parser = CommandParser(
        "python -m mingpt", "\n".join(["commands:", *lines]), "%(prog)s COMMAND [arguments]"
    )
    parser.add_argument("command", metavar="COMMAND", help="followed by --help: its options")
    command = parser.parse_args(arguments[:1] or ["--help"]).command
    if command not in COMMANDS:
        parser.error(f"unknown command '{command}', the commands are {', '.join(COMMANDS)}")
    module = importlib.import_module(f"mingpt.{COMMANDS[command][0]}")
    exit_code: int = module.main(arguments[1:])
    return exit_code


def run() -> int:
    """Run the command line of `python -m mingpt` or of the program `mingpt`; return the exit code."""
    return run_command(main, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
