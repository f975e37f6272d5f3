"""Check an answer to an exercise: run it in processes of its own, and say in sentences what is wrong.

    python -m tutorial.check N [FILE]

N is the number of the exercise, FILE the answer, by default the file of tutorial/exercises/. Exit code 0 if
the answer holds, 1 if it is refused, 2 if there is no such exercise or file.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 28
FOLDER = Path(__file__).parent / "exercises"


def find_files(words: list[str]) -> tuple[Path, Path]:
    """The file of the exercise, and that of the answer. Raises ValueError with a sentence."""
    exercises = {path.name.split("_")[0]: path for path in sorted(FOLDER.glob("[0-9]_*.py"))}
    if not 1 <= len(words) <= 2 or words[0] not in exercises:
        names = ", ".join(path.stem for path in exercises.values())
        raise ValueError(f"usage: python -m tutorial.check N [FILE]; the exercises are {names}")
    exercise = exercises[words[0]]
    answer = Path(words[1]) if len(words) == 2 else exercise
    if not answer.is_file():
        raise ValueError(f"there is no file {answer}")
    return exercise, answer


def run_judge(exercise: Path, answer: Path) -> int:
    """Run tutorial/checks/judge.py with a limit of time, in a session that ends with it."""
    command = [sys.executable, "-u", "-m", "tutorial.checks.judge", exercise.stem, str(answer.resolve())]
    with tempfile.TemporaryFile("w+") as errors:
        judge = subprocess.Popen(
            command, cwd=FOLDER.parent.parent, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = judge.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"The check was not done after {LIMIT_S} s. Is the answer slow, or the machine busy?")
            return 1
        finally:
            try:
                os.killpg(judge.pid, signal.SIGKILL)  # the judge, and every process that it started
            except ProcessLookupError:
                pass  # all of them have ended
            judge.wait()
        if code in (0, 3):
            return 0 if code == 0 else 1
        errors.seek(0)
        last_line = ([line for line in errors.read().splitlines() if line.strip()] or ["no message"])[-1]
        print(f"The checker itself failed (exit code {code}): {last_line}")
        return 1


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that processes are ended then, too
    try:
        exercise, answer = find_files(sys.argv[1:])
    except ValueError as error:
        print(error)
        return 2
    try:
        return run_judge(exercise, answer)
    except KeyboardInterrupt:
        print("The check was stopped.")
        return 1


if __name__ == "__main__":
    sys.exit(main())
