"""ddp in which each rank updates its rows of the weights: `trainer.shard_optimizer`."""

from pathlib import Path

import pytest
from support.parallel_program import Results, assert_close, assert_equal, assert_pieces, run_program, whole


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_program(Path(tmp_path_factory.mktemp("sharded") / "results"), "sharded optimizer")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("case", "expected"), [("exact", "whole"), ("exact, gpt2", "whole, gpt2"), ("exact, idle", "whole, idle")]
)
def test_each_rank_has_its_rows_of_the_gradient(
    results: Results, case: str, expected: str, ranks: int
) -> None:
    assert_pieces([outcomes[case] for outcomes in results[ranks]], results[1][0][expected])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["exact", "exact, gpt2", "exact, idle", "fast"])
def test_after_an_update_all_ranks_hold_the_same_weights(results: Results, case: str, ranks: int) -> None:
    outcomes = [of_rank[case] for of_rank in results[ranks]]
    for outcome in outcomes:
        assert_equal(outcome.held, whole([other.pieces for other in outcomes]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fast_reduction_is_close(results: Results, ranks: int) -> None:
    expected, outcomes = results[1][0]["whole"], [of_rank["fast"] for of_rank in results[ranks]]
    assert_close(whole([outcome.gradients for outcome in outcomes]), expected.gradients)
    assert_close(outcomes[0].held, expected.held)
    assert outcomes[0].norm == pytest.approx(expected.norm, rel=1e-4)
    assert len({outcome.norm for outcome in outcomes}) == 1
