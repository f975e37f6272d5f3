import socket
import threading
import time
from pathlib import Path

import pytest

from mingpt.base.errors import UserError
from mingpt.base.system import OutOfTime, check_working_directory, loopback_address, run_within, try_within


def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_working_directory()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match=r"the working directory cannot be used \(No such file"):
        check_working_directory()


def test_work_that_ends_in_time_gives_its_result_or_its_error() -> None:
    """If the work itself times out, that is not taken for the end of the limit."""

    def work() -> None:
        raise TimeoutError("of the store")

    assert run_within(30, lambda: "done") == "done" and try_within(30, lambda: None)
    with pytest.raises(TimeoutError, match="of the store"):
        run_within(30, work)


def test_work_that_hangs_is_given_up_when_the_limit_is_over() -> None:
    hangs, began = threading.Event(), time.monotonic()
    with pytest.raises(OutOfTime, match=r"^not done within 0\.2 s$"):
        run_within(0.2, hangs.wait)
    assert not try_within(0.2, hangs.wait)
    assert 0.4 <= time.monotonic() - began < 10
    hangs.set()


def test_a_host_without_ipv4_has_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback_address() == "127.0.0.1"
    monkeypatch.setattr(socket, "AF_INET", 9999)  # the kernel knows no such family
    assert loopback_address() == "::1"
