"""Workers of `python train.py` whose processes were started before its agent had imported torch."""

import json
import os
import signal
from pathlib import Path

from conftest import Start, all_gone, changed_program, command, final_hash, reached, wait_until

from mingpt.jobs import children, read_history

# What a program can see of how it was started, in a line per process.
TELL = """
import json, os
with open({path!r}, "a") as file:
    seen = [__name__, __file__, sys.argv, sys.path, sys.flags.safe_path]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS")
    file.write(json.dumps([seen, [os.environ.get(name) for name in names], sorted(os.environ)]) + chr(10))
"""


def test_a_program_sees_no_difference(start: Start, text: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.jsonl"
    program = changed_program(tmp_path, TELL.format(path=str(told)))
    job = start(command(program=program, run_dir=tmp_path / "run", data__path=text, trainer__workers=2))
    job.wait_until(reached(tmp_path / "run", 12))
    os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    agent, *workers = map(json.loads, told.read_text().splitlines())
    assert agent[1] == [None] * 5
    by_rank = sorted((environment, seen, names) for seen, environment, names in workers)
    first, again, other, other_again = by_rank
    for rank, one, two in (("0", first, again), ("1", other, other_again)):
        assert one[0] == [rank, rank, "2", "0", "1"] and two[0] == [rank, rank, "2", "1", "1"]
        assert one[1] == two[1] == agent[0]
        assert one[2] == two[2]


def test_they_end_with_an_agent_that_is_killed(start: Start, text: Path, tmp_path: Path) -> None:
    job = start(command(run_dir=tmp_path / "run", data__path=text, trainer__workers=2))
    wait_until(lambda: len(children(job.pid)) == 2)
    started = children(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(started))
    assert not (tmp_path / "run" / "run.json").exists(), "they were workers already"


def test_one_that_is_killed_is_replaced(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    job = start(command(run_dir=tmp_path, data__path=text, trainer__workers=2))
    wait_until(lambda: len(children(job.pid)) == 2)
    os.kill(children(job.pid)[1], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    assert read_history(tmp_path)["status"] == "finished"
    assert final_hash(tmp_path) == final_hash(undisturbed)
