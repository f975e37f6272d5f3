import errno
from pathlib import Path

import pytest

from mingpt.cli import build
from mingpt.errors import UserError
from mingpt.initialize import make_run_dir


def fail(monkeypatch: pytest.MonkeyPatch, method: str, code: int) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise OSError(code, "broken")

    monkeypatch.setattr(Path, method, raise_error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_refuses_no_job_whose_folder_is_there(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    fail(monkeypatch, "open", code)
    assert make_run_dir(build({"run_dir": str(run_dir)})) == run_dir


@pytest.mark.parametrize(
    ("method", "code"), [("mkdir", errno.ENOSPC), ("mkdir", errno.EACCES), ("open", errno.EROFS)]
)
def test_a_folder_that_cannot_be_made_or_written_is_refused(
    method: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, method, code)
    with pytest.raises(UserError, match=r"run_dir .*/run cannot be written to: broken"):
        make_run_dir(build({"run_dir": str(tmp_path / "run")}))
