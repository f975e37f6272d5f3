"""Both reductions of ddp, and the hook for a loop that keeps DDP, on 1 to 4 ranks."""

from pathlib import Path

import pytest
from support.parallel_program import RANKS, Results, assert_close, assert_equal, run_program


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_program(Path(tmp_path_factory.mktemp("ddp") / "results"), "ddp")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("case", "same"),
    [("exact", "exact"), ("idle", "idle"), ("hook", "exact"), ("hook, modern", "exact, modern")],
)
def test_the_bits_are_those_of_exact_reduction_on_one_rank(
    results: Results, case: str, same: str, ranks: int
) -> None:
    """The case `idle` has two micro-batches, so that some ranks have none; `hook` is ExactHook."""
    expected = results[1][0][same]
    for outcomes in results[ranks]:
        for part in ("gradients", "clipped", "held"):
            assert_equal(getattr(outcomes[case], part), getattr(expected, part))
        assert outcomes[case].norm == expected.norm and outcomes[case].eval_loss == expected.eval_loss


def test_the_bits_of_fast_reduction_depend_on_the_number_of_ranks(results: Results) -> None:
    gradients = [results[ranks][0]["fast"].gradients.values() for ranks in RANKS]
    assert len({b"".join(one.numpy().tobytes() for one in of_run) for of_run in gradients}) > 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("case", "exact"), [("fast", "exact"), ("idle fast", "idle")])
def test_fast_reduction_differs_by_the_order_of_additions_alone(
    results: Results, case: str, exact: str, ranks: int
) -> None:
    expected = results[1][0][exact]
    for outcomes in results[ranks]:
        assert_close(outcomes[case].gradients, expected.gradients)
        assert_equal(outcomes[case].held, results[ranks][0][case].held)
        assert outcomes[case].norm == pytest.approx(expected.norm, rel=1e-4)


def test_gradients_are_large_enough_and_clipped(results: Results) -> None:
    """Otherwise the comparisons above would show nothing."""
    outcome = results[1][0]["exact"]
    assert max(float(gradient.abs().max()) for gradient in outcome.gradients.values()) > 1e-3
    assert outcome.norm > 0.05
    name = "h.0.attn.c_attn.weight"
    assert not outcome.clipped[name].equal(outcome.gradients[name])
