import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from support.reduce_program import MICRO_BATCHES, reduce_step
from support.single_process import SingleProcess
from torch import Tensor

Gradients = dict[str, Tensor]


def reduce_alone(reduction: str) -> Gradients:
    return reduce_step(reduction, SingleProcess(), [range(MICRO_BATCHES)])


@pytest.fixture
def of_two_ranks(tmp_path: Path) -> list[dict[str, Gradients]]:
    """The gradients that each of two processes has after a step, by strategy and case."""
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    processes = []
    for rank in range(2):
        command = [
            sys.executable,
            "-m",
            "support.reduce_program",
            str(rank),
            str(tmp_path / "store"),
            str(tmp_path / f"{rank}.pt"),
        ]
        environment = os.environ | {"PYTHONPATH": search_path}
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


def assert_close(mine: Gradients, expected: Gradients) -> None:
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_equal(mine: Gradients, expected: Gradients) -> None:
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        assert torch.equal(gradient, expected[name]), name


def test_without_a_process_group_the_gradient_is_that_of_exact_reduction() -> None:
    """As far as another order of additions allows."""
    exact = reduce_alone("exact")
    assert max(float(gradient.abs().max()) for gradient in exact.values()) > 1e-3
    assert_close(reduce_alone("fast"), exact)


def test_two_ranks_have_the_gradient_of_one(of_two_ranks: list[dict[str, Gradients]]) -> None:
    """Fast reduction as far as another order of additions allows, exact reduction to the bit.

    In the case `idle` one of the ranks has no micro-batches.
    """
    exact = reduce_alone("exact")
    first, second = of_two_ranks
    for case in ("even", "idle"):
        for gradients in of_two_ranks:
            assert_close(gradients[f"fast {case}"], exact)
            assert_equal(gradients[f"exact {case}"], exact)
        assert_equal(first[f"fast {case}"], second[f"fast {case}"])
