"""Both reductions of ddp, on 1, 2 and 3 ranks."""

from pathlib import Path

import pytest
from support.parallel_program import Results, assert_close, assert_equal, run_program


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_program(Path(tmp_path_factory.mktemp("ddp") / "results"), "ddp")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["exact", "idle"])
def test_exact_reduction_has_the_bits_of_one_rank(results: Results, case: str, ranks: int) -> None:
    """The case `idle` has two micro-batches, so that one of three ranks has none."""
    expected = results[1][0][case]
    for outcomes in results[ranks]:
        for part in ("gradients", "clipped", "held"):
            assert_equal(getattr(outcomes[case], part), getattr(expected, part))
        assert outcomes[case].norm == expected.norm and outcomes[case].eval_loss == expected.eval_loss


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
