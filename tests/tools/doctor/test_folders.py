"""Folders that the doctor makes to try them are removed again, whichever rank made which and ends first."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mingpt.config import Config
from mingpt.tools.doctor.facts import Folders

RANKS = (0, 1)


def two_ranks(run_dir: Path) -> list[Folders]:
    return [Folders(replace(Config(), run_dir=str(run_dir))) for _ in RANKS]


def facts(folders: Folders) -> dict[str, Any]:
    return {"probe": folders.probe, "made": [str(folder) for folder in folders.made]}


def try_all(ranks: list[Folders], *order: int) -> None:
    """Each number is a rank, which tries its next folder: the run's, then that of snapshots."""
    left = [list(folders.places.values()) for folders in ranks]
    for rank in order:
        assert ranks[rank].try_one(left[rank].pop(0)) is None
    assert left == [[], []]


@pytest.mark.parametrize("first", RANKS)
@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_nothing_is_left_in_any_order(order: tuple[int, ...], first: int, tmp_path: Path) -> None:
    """In the last order, rank 0 makes `run`, and rank 1 `run/snapshots`."""
    ranks = two_ranks(tmp_path / "new" / "run")
    try_all(ranks, *order)
    for folders in ranks:
        folders.share(folders.visible(), [facts(folders) for folders in ranks])
    ranks[first].clean_up()
    assert len(list(tmp_path.rglob("doctor-*"))) == 2  # those of the other rank
    ranks[1 - first].clean_up()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_remains(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ranks = two_ranks(tmp_path / "run")
    try_all(ranks, 0, 1, 1, 0)
    for folders in ranks:
        folders.share(folders.visible(), [facts(folders) for folders in ranks])
        folders.clean_up()
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_an_empty_folder_of_a_node_that_shares_no_disk_remains(tmp_path: Path) -> None:
    """The other node has made a folder of the same name, on its own disk."""
    (tmp_path / "run").mkdir()
    (folders, _) = two_ranks(tmp_path / "run")
    for place in folders.places.values():
        assert folders.try_one(place) is None
    folders.share(folders.visible(), [{"probe": "doctor-elsewhere", "made": [str(tmp_path / "run")]}])
    folders.clean_up()
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]
