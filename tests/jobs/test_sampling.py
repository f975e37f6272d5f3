"""sample.py, started as a user starts it."""

import subprocess
import sys
from pathlib import Path

from conftest import ROOT, SMALL

from mingpt.jobs import clean_environment


def sample(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "sample.py", *words]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which sample.py refuses."""
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ")


def test_a_prompt_with_an_unknown_character_names_it(undisturbed: Path) -> None:
    error = error_of(sample(str(undisturbed), "--prompt", "The king ☃"))
    assert error.startswith("the character '☃' (U+2603) is not in the vocabulary")


def test_it_prints_the_prompt_and_the_text_and_nothing_else(undisturbed: Path) -> None:
    """More text than fits into the context; the seed determines it."""
    options = ["--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed"]
    one, again, other = (sample(str(undisturbed), *options, seed) for seed in ("1", "1", "2"))
    assert one.returncode == 0 and one.stderr == "" and one.stdout.startswith("The ")
    assert len(one.stdout) == len("The ") + 100 + 1 > SMALL["data.block_size"]
    assert one.stdout == again.stdout != other.stdout


def test_without_a_snapshot_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    assert "there is no snapshot in" in error_of(sample(str(tmp_path)))


def test_several_samples_each_have_the_prompt_and_the_first_is_the_one_of_the_seed(undisturbed: Path) -> None:
    options = [str(undisturbed), "--prompt", "The ", "--tokens", "30"]
    one, two = sample(*options).stdout, sample(*options, "--num_samples", "2").stdout
    assert two.startswith(one) and two[len(one) :].startswith("The ") and len(two) == 2 * len(one)
    assert two[len(one) :] != one


def test_a_sample_ends_before_the_text_to_stop_at(undisturbed: Path) -> None:
    options = [str(undisturbed), "--prompt", "The ", "--tokens", "100", "--top_k", "5"]
    whole = sample(*options).stdout.removesuffix("\n")
    stop = whole[50:53]
    assert sample(*options, "--stop", stop).stdout == whole[: whole.index(stop, len("The "))] + "\n"
    assert sample(*options, "--stop", "\u2603").stdout == whole + "\n"


def test_the_prompt_may_come_from_a_file_or_from_stdin(undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("The king\n")
    options = [str(undisturbed), "--tokens", "20"]
    expected = sample(*options, "--prompt", "The king\n").stdout
    assert sample(*options, "--prompt_file", str(tmp_path / "prompt")).stdout == expected
    command = [sys.executable, "sample.py", *options, "--prompt_file", "-"]
    with (tmp_path / "prompt").open() as stdin:
        done = subprocess.run(
            command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, stdin=stdin
        )
    assert done.stdout == expected
    assert "cannot be read" in error_of(sample(*options, "--prompt_file", str(tmp_path / "none")))
    (tmp_path / "bytes").write_bytes(b"The \xff")
    assert "cannot be read" in error_of(sample(*options, "--prompt_file", str(tmp_path / "bytes")))
    (tmp_path / "empty").write_bytes(b"")
    assert "the prompt is empty" in error_of(sample(*options, "--prompt_file", str(tmp_path / "empty")))
