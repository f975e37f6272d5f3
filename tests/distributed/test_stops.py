"""StopSignal: a request to stop waits for the end of a step, on all ranks."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.forks import fork_ranks
from support.jobs import ROOT, Start

from mingpt.distributed import DistributedContext, StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_kept_until_the_end_of_a_step_and_repeated_ones_are_one(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.agreed() is None
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop.agreed() == number.name
    assert signal.getsignal(number) == before


def test_a_later_signal_ends_the_process(start: Start) -> None:
    program = (
        "from mingpt.distributed import StopSignal\nimport time\nstop = StopSignal()\nprint('on', flush=True)"
    )
    job = start([sys.executable, "-c", f"{program}\ntime.sleep(60)"])
    job.wait_until(lambda: "on" in job.out())
    for _ in range(2):
        time.sleep(1.2)
        assert job.is_running()
        job.process.send_signal(signal.SIGTERM)
    assert job.wait(10) == -signal.SIGTERM


def test_a_time_is_a_request_too() -> None:
    stop = StopSignal(pause_after="1h")
    assert stop.agreed() is None
    stop.pause_at -= 3600
    assert stop.agreed() == "trainer.pause_after"
    stop.close()


def request_on_one(context: DistributedContext) -> str | None:
    with StopSignal() as stop:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return stop.agreed()


def test_all_ranks_agree_on_what_one_has_received() -> None:
    assert fork_ranks(2, request_on_one) == ["SIGUSR1"] * 2


def test_no_signal_handler_keeps_a_process_group_past_the_programs_end() -> None:
    """Threads of gloo that free a tensor's Python object then would end the process with SIGABRT."""
    program = (
        "import atexit\nfrom mingpt.distributed import StopSignal\n"
        "atexit.register(lambda: print(type(stop.group).__name__))\n"
        "stop = StopSignal()\nstop.group = 'a group'"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "BackgroundGroup\n", done.stderr
