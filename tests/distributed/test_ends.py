from pathlib import Path

import pytest

from mingpt.distributed.ends import LOST_PEER, TIMED_OUT, TOLD, GenerationEnd, stack_path, stuck_place

FAILED = "failed (OSError: planted)"
NO_PEER = f"{LOST_PEER} (Connection closed by peer)"


@pytest.mark.parametrize(
    ("whys", "sentence"),
    [
        ({}, "workers 0, 1 vanished"),
        ({"r0": NO_PEER}, "worker 1 vanished"),
        ({"r0": "finished"}, "worker 1 vanished"),
        ({"r0": f"{TIMED_OUT} 2.5 s"}, "worker 1 did not answer for 2.5 s"),
        ({"r0": NO_PEER, "r1": FAILED}, f"worker 1 {FAILED}"),
        ({"r0": FAILED, "r1": FAILED}, f"worker 0 {FAILED}; worker 1 {FAILED}"),
        (
            {"r0": f"{TOLD} by SIGTERM", "r1": NO_PEER},
            f"the workers {NO_PEER}; the workers were told to stop by SIGTERM",
        ),
        ({"r0": NO_PEER, "r1": LOST_PEER}, "the workers lost a peer (Connection closed by peer)"),
        ({"r0": "finished", "r1": "finished"}, "the workers finished"),
        ({"r0": "stopped by STOP", "r1": "stopped by STOP"}, "the workers were stopped by STOP"),
    ],
)
def test_the_end_of_a_generation_is_one_sentence(whys: dict[str, str], sentence: str) -> None:
    reasons = [{"why": whys[rank], "step": 0} if rank in whys else None for rank in ("r0", "r1")]
    assert GenerationEnd(reasons).sentence() == sentence


def test_the_last_step_is_the_furthest_that_any_rank_has_reported() -> None:
    reasons = [{"why": NO_PEER, "step": 10 + rank} for rank in (0, 1)]
    assert GenerationEnd([*reasons, None]).step() == 11
    assert GenerationEnd([None, None]).step() is None


STACKS = """Timeout (0:00:30)!
Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
Thread 0x00007f01 (most recent call first):
{}"""
LIBRARY, OWN = (
    'File "/usr/lib/python3.11/socket.py", line 7 in read\n',
    'File "/home/me/data.py", line 9 in fetch\n',
)
IN_LIB64 = 'File "/a/lib64/python3.14/site-packages/torch/b.py", line 8 in c\n'
INSTALLED = (
    'File "/a/lib/python3.14/site-packages/mingpt/a.py", line 3 in step\n'
    'File "<frozen runpy>", line 88 in _run_code\n'
)


@pytest.mark.parametrize(
    ("stacks", "place"),
    [
        (STACKS.format(LIBRARY + OWN), "data.py:9 in fetch"),
        (STACKS.format(LIBRARY), "socket.py:7 in read"),
        (STACKS.format(IN_LIB64 + OWN), "data.py:9 in fetch"),
        (STACKS.format(IN_LIB64 + INSTALLED), "a.py:3 in step"),
        (OWN, "it wrote no stacks (stopped, or its machine is lost)"),  # without a time-out, somebody asked
    ],
)
def test_a_worker_that_hung_did_so_at_the_innermost_line_outside_libraries(stacks: str, place: str) -> None:
    assert stuck_place(stacks) == place


def test_a_file_of_stacks_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    end = GenerationEnd([{"why": f"{TIMED_OUT} 2.5 s", "step": 0}, None, None], name="abcdefghij")
    stack_path(tmp_path, end.name, 1).mkdir()
    stack_path(tmp_path, end.name, 2).write_text(STACKS.format(OWN))
    assert end.sentence(tmp_path) == "workers 1, 2 did not answer for 2.5 s: data.py:9 in fetch"
