"""The frame of the commands: their paths, options, and standard streams that are closed, full or encoded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mingpt.__main__ import main
from mingpt.base.command import run_command
from mingpt.base.errors import UserError
from mingpt.config.cli import parse
from mingpt.tools.jobs import ROOT, clean_environment

# The options of a locale without UTF-8, in which Python does not replace ASCII by UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Name: (variables, where the output goes, the exit code, the end of the one line on stderr)
LOST = "error: standard output cannot be written: "
OUTPUTS = {
    "ascii": (ASCII, "", 0, ""),
    "latin-1": ({"PYTHONIOENCODING": "latin-1"}, "", 0, ""),
    "closed": ({}, ">&-", 2, f"{LOST}Bad file descriptor\n"),
    "full": ({}, ">/dev/full", 2, f"{LOST}No space left on device\n"),
    "without a reader": ({}, "| true", 1, ""),
}
PROGRAMS = ["train.py --help", "train.py --print_config", "sample.py --help", "-m mingpt"]


def run(words: str, redirection: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python words` in a shell. The exit code is Python's, also where its output goes into a pipe."""
    command = ["bash", "-c", f"set -o pipefail; {sys.executable} {words} {redirection}"]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(**env), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("program", "output"),
    [*((PROGRAMS[0], output) for output in OUTPUTS), *((program, "full") for program in PROGRAMS[1:])],
)
def test_lost_output_is_one_sentence_unless_its_reader_is_gone(program: str, output: str) -> None:
    env, redirection, code, sentence = OUTPUTS[output]
    done = run(program, redirection, **env)
    assert (done.returncode, done.stderr) == (code, sentence)
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>&1 >&- | true"])
def test_a_stderr_that_is_lost_changes_no_exit_code(redirection: str) -> None:
    assert run("-m mingpt nosuch", redirection).returncode == 2


LONG = """
import sys
from mingpt.base.command import run_command, write_stdout
sys.exit(run_command(lambda _: write_stdout("x" * 1_000_000) or 0, []))
"""
PRINTS = """
import sys
from mingpt.base.command import run_command, write_stdout
def main(words):
    write_stdout("caf\\u00e9 \\u6d77 \\udcff ")
    print(len(sys.stdin.read()))
    print("\\u6d77", file=sys.stderr)
    return 0
sys.exit(run_command(main, []))
"""


def test_characters_that_the_encoding_lacks_are_written_as_escapes() -> None:
    done = run(f"-c '{PRINTS}'", "<&-", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\u6d77 \\udcff 0\n")
    assert done.stderr == "\\u6d77\n"


def test_a_pipe_that_does_not_block_gets_all_output() -> None:
    """Programs such as node set this on the pipes and terminals of their children."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    program = subprocess.Popen([sys.executable, "-c", LONG], cwd=ROOT, stdout=write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert len(pipe.read()) == 1_000_000
    assert program.wait() == 0


def test_a_named_pipe_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(UserError, match=r"the configuration file .*/link is a named pipe"):
        parse([str(tmp_path / "link")])


def test_the_pipe_of_another_process_is_read(tmp_path: Path) -> None:
    """A shell's <(command) names such a pipe, which has no name in a folder."""
    code = "import sys; from mingpt.config.cli import parse; print(parse(sys.argv[1:]).seed)"
    words = [sys.executable, "-c", code, "/dev/stdin"]
    assert subprocess.check_output(words, input="seed: 008", text=True, cwd=ROOT) == "8\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "$RUN", "out"], "argument RUN: the path '$RUN' has a variable in it"),
        (["export", "run", "None"], "argument OUT_DIR: the path 'None' is not a path"),
        (["compare", "run", "${OTHER}"], "argument RUN: the path '${OTHER}' has a variable in it"),
        (["compare", "~/run", "run"], "/home/nobody-here/run is not there"),
        (["timeline", "x" * 256], "argument RUN: the path '" + "x" * 256 + "' has a name of more than 255"),
        (["prepare", "text", "--out=null"], "argument --out: the path 'null' is not a path"),
        (["prepare", "a::b", "--out=out"], "argument TEXT_OR_URL: the path 'a::b' has :: in it"),
        (["prepare", "text", "--out="], "argument --out: the path '' is not a path"),
    ],
)
def test_the_paths_of_every_command_are_read_alike(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/nobody-here")
    assert run_command(main, words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {sentence}") and shown.count("\n") == 1
