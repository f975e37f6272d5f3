"""The tutorial's pictures are the same when drawn again."""

from pathlib import Path

import pytest
from conftest import ROOT

from tutorial.pictures import main

COMMITTED = sorted((ROOT / "tutorial" / "pictures").glob("*.svg"))


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the tutorial's programs read data/input.txt


def test_the_committed_pictures_are_what_the_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutorial.pictures.FOLDER", tmp_path)
    main()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in COMMITTED}
