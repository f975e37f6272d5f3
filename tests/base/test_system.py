import os
import threading
import time

import pytest

from mingpt.base.system import OutOfTime, run_within, try_within


def test_work_that_ends_in_time_gives_its_result_or_its_error() -> None:
    assert run_within(30, lambda: "done") == "done"
    with pytest.raises(KeyError, match="MISSING"):
        run_within(30, lambda: os.environ["MISSING"])


def test_a_time_out_of_the_work_itself_is_told_from_that_of_the_limit() -> None:
    def work() -> None:
        raise TimeoutError("of the store")

    with pytest.raises(TimeoutError, match="of the store"):
        run_within(30, work)


def test_work_that_hangs_is_given_up_when_the_limit_is_over() -> None:
    hangs, began = threading.Event(), time.monotonic()
    with pytest.raises(OutOfTime, match=r"^not done within 0\.2 s$"):
        run_within(0.2, hangs.wait)
    assert not try_within(0.2, hangs.wait)
    assert 0.4 <= time.monotonic() - began < 10
    hangs.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_whose_error_nobody_waits_for_does_not_end_its_caller() -> None:
    assert try_within(30, lambda: os.environ["MISSING"])
