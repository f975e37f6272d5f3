"""FSDP2 on 1, 2 and 3 ranks with 7 micro-batches, so that ranks compute dummies in the last round."""

from pathlib import Path

import pytest
from support.parallel_program import (
    RANKS,
    Outcome,
    Results,
    assert_close,
    assert_equal,
    assert_pieces,
    run_program,
    whole,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_program(Path(tmp_path_factory.mktemp("fsdp") / "results"), "fsdp")


def of_ranks(results: Results, case: str, ranks: int) -> list[Outcome]:
    return [outcomes[case] for outcomes in results[ranks]]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["gpt2 float32", "gpt2 bfloat16", "modern float32", "modern bfloat16"])
def test_the_bits_are_those_of_one_process_under_ddp(results: Results, kind: str, ranks: int) -> None:
    """Dropout is on; gpt2's embedding and head share one parameter."""
    assert_pieces(of_ranks(results, f"fsdp {kind}", ranks), results[1][0][f"ddp {kind}"])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("case", "same"),
    [
        ("fsdp gpt2 float32, kept", "ddp gpt2 float32"),
        ("fsdp gpt2 float32, recomputed", "ddp gpt2 float32"),
        ("fsdp modern bfloat16, recomputed", "ddp modern bfloat16"),
        ("fsdp gpt2 float32, one unit", "ddp gpt2 float32"),
        ("fsdp modern bfloat16, one unit", "ddp modern bfloat16"),
        ("fsdp, idle", "ddp, idle"),
    ],
)
def test_what_saves_memory_or_time_leaves_the_bits_alone(
    results: Results, case: str, same: str, ranks: int
) -> None:
    """Cases: weights kept, activations recomputed, all weights gathered at once, a rank with only dummies."""
    assert_pieces(of_ranks(results, case, ranks), results[1][0][same])


@pytest.mark.parametrize("ranks", RANKS)
def test_the_stock_reduction_is_close(results: Results, ranks: int) -> None:
    expected, outcomes = (
        results[1][0]["ddp gpt2 float32"],
        of_ranks(results, "fsdp gpt2 float32, fast", ranks),
    )
    assert_close(whole([outcome.gradients for outcome in outcomes]), expected.gradients)
    assert {outcome.norm for outcome in outcomes} == {outcomes[0].norm}
    assert outcomes[0].norm == pytest.approx(expected.norm, rel=1e-4)


def test_a_narrow_type_for_gathered_weights_has_bits_of_its_own(results: Results) -> None:
    """The bits are the same for any number of ranks; gradients and weights stay float32."""
    alone = results[1][0]["narrow"]
    for ranks in RANKS:
        assert_pieces(of_ranks(results, "narrow", ranks), alone)
    expected = results[1][0]["ddp gpt2 float32"]
    name = "h.0.mlp.c_fc.weight"
    assert alone.gradients[name].dtype == alone.held[name].dtype == expected.held[name].dtype
    assert not alone.gradients[name].equal(expected.gradients[name])
    assert alone.norm == pytest.approx(expected.norm, rel=0.1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_its_rows_of_each_weight_and_nothing_else(results: Results, ranks: int) -> None:
    """The last of three ranks has none of the 4 rows of wpe."""
    for rank, outcome in enumerate(of_ranks(results, "fsdp gpt2 float32", ranks)):
        assert_equal(outcome.held, outcome.pieces)
        lengths = {2: [2, 2], 3: [2, 2, 0]}
        assert len(outcome.held["wpe.weight"]) == lengths[ranks][rank]


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_end_what_they_do_together_if_one_is_to(results: Results, ranks: int) -> None:
    assert {outcome.any_of_one for outcome in of_ranks(results, "fsdp gpt2 float32", ranks)} == {
        (True, False)
    }
