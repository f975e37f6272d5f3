"""Ranks that write a snapshot together, of which one holds the claim to its folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SMALL
from support.ranks import run_ranks

from mingpt.base.errors import ClaimLost, LaterGeneration, SupersededError
from mingpt.config.cli import build
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Process
from mingpt.training.claim import Claim, Holder
from mingpt.training.run_folder import Claims, RunFolder, claim_places


def claim_together(
    folder: Path, settings: dict[str, Any], snapshots_are_shared: bool = True
) -> tuple[Claims, Claims]:
    """Of rank 0, which keeps the run folder and the snapshots, and of rank 1."""
    config = build(SMALL | {"run_dir": str(folder)} | settings)

    def work(context: DistributedContext) -> Claims:
        context.exit = SimpleNamespace(on_job_end=lambda release: None)  # type: ignore[assignment]
        keeps = context.rank == 0
        return claim_places(config, context, RunFolder(folder, keeps, keeps, True, 0, snapshots_are_shared))

    claims = []
    for result in run_ranks(2, work, one_node=True):
        assert isinstance(result, Claims), result
        claims.append(result)
    return claims[0], claims[1]


@pytest.fixture(params=["run folder", "folder"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Where the snapshots are."""
    return {"snapshot.path": str(tmp_path / "elsewhere")} if request.param == "folder" else {}


def take_over(url: str, is_same_job: bool) -> None:
    """As another job does whose claim comes after all that are there."""
    claim = Claim(url, "it")
    number, holder, _ = claim.read_newest()
    assert holder is not None
    job = holder.job if is_same_job else "another"
    claim.create(number + 1, Holder((Process("host", "host", 1, "1"),), job=job))


@pytest.mark.parametrize(
    ("is_same_job", "error"), [(True, LaterGeneration), (False, SupersededError)], ids=["later", "other"]
)
def test_a_rank_without_a_claim_learns_that_the_snapshots_are_no_longer_the_jobs(
    is_same_job: bool, error: type[ClaimLost], tmp_path: Path, settings: dict[str, Any]
) -> None:
    first, second = claim_together(tmp_path / "run", settings)
    place = settings.get("snapshot.path", str(tmp_path / "run"))
    for claims in (first, second):
        claims.check()
    take_over(place, is_same_job)
    for claims in (first, second):
        with pytest.raises(error, match="snapshot.path" if settings else "run_dir"):
            claims.check()
    first.release()
    second.release()


def test_it_neither_renews_nor_releases_the_claim(tmp_path: Path) -> None:
    first, second = claim_together(tmp_path / "run", {})
    second.mark_started()
    second.release()
    first.check()
    first.mark_started()
    first.release()


def test_a_listing_that_is_late_on_another_machine_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim_together(tmp_path / "run", {})
    monkeypatch.setattr(Claim, "numbers", lambda self: [])
    second.check()
    with pytest.raises(SupersededError):
        first.check()


@pytest.mark.parametrize(
    ("path", "snapshots_are_shared"),
    [(None, False), ("memory://claims-of-a-process", True)],
    ids=["node", "process"],
)
def test_where_no_other_rank_writes_to_the_same_snapshots_none_looks_there(
    path: str | None, snapshots_are_shared: bool, tmp_path: Path
) -> None:
    """Each node has its own, or each process."""
    first, second = claim_together(tmp_path / "run", {"snapshot.path": path}, snapshots_are_shared)
    take_over(str(tmp_path / "run"), is_same_job=False)
    second.check()
    with pytest.raises(SupersededError):
        first.check()
