"""Which ranks are named when workers compute differently, and which snapshots are used then."""

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.jobs import (
    SMALL,
    Finish,
    Start,
    changed_program,
    command,
    error_of,
    final_hash,
    read_history,
    torchrun,
)
from support.ranks import results_of_threads

from mingpt.config.cli import build
from mingpt.distributed import DistributedContext
from mingpt.parallel import digest, strategy
from mingpt.training.replay import Replay

# From step FIRST + 1 on, one bit of a gradient is wrong on rank 1.
LIE = """
import torch
def on_run_start(state, strategy):
    def flip(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
        return gradient
    def on_output(module, inputs, output):
        if strategy.rank == 1 and state.step >= FIRST and output.requires_grad:
            output.register_hook(flip)
    state.model.h[0].register_forward_hook(on_output)
events.subscribe("run_start", on_run_start)
"""


class Computer(Replay):
    """A Replay with errors: `wrong` has, by rank, the calls of `digests` with another result, or "always"."""

    def __init__(
        self,
        context: DistributedContext,
        wrong: dict[int, Any],
        copies: dict[int, float],
        device: str = "cpu",
        kernels: str = "none",
    ) -> None:
        shares = [range(2 * rank, 2 * rank + 2) for rank in range(context.world_size)]
        setup = SimpleNamespace(micro_batches_by_rank=shares)
        strategy = SimpleNamespace(setup=setup, weights_are_sharded=False, updates_are_sharded=True)
        weight = torch.tensor(copies.get(context.rank, 1.0))
        state: Any = SimpleNamespace(
            step=0,
            strategy=strategy,
            tensors=lambda: {"model.a": weight, "optimizer.a.step": torch.tensor(float(context.rank))},
        )
        run: Any = SimpleNamespace(
            config=build(SMALL),
            context=context,
            state=state,
            strategy=strategy,
            sampler=None,
            corpus=SimpleNamespace(train=None),
            environment=SimpleNamespace(device=device, kernels=kernels),
            start=SimpleNamespace(step=0),
        )
        saving: Any = SimpleNamespace(
            replayed_step=0, start=SimpleNamespace(generation=1), set_aside_after=lambda step: 0
        )
        super().__init__(run, saving, Mock())
        self.wrong, self.calls = wrong.get(context.rank, ()), 0

    def can_read(self, *numbers: int) -> bool:
        return True

    def digests(self, number: int) -> dict[str, torch.Tensor]:
        self.calls += 1
        is_wrong = self.wrong == "always" or self.calls in self.wrong
        return {"a": torch.tensor(0), "b": torch.tensor(10 * number + is_wrong * (1 + self.context.rank))}


@pytest.mark.parametrize(
    ("workers", "wrong", "named", "micro_batch"),
    [
        (3, {}, None, 0),
        (3, {2: "always"}, [2], 0),
        (4, {0: "always"}, [0], 0),
        (4, {1: "always", 3: "always"}, [1, 3], 0),
        (3, {0: "always", 1: "always"}, [0, 1, 2], 0),  # no two ranks agree
        (2, {1: "always"}, [0, 1], 0),
        (3, {1: [1]}, [1], 2),  # wrong once, for its own micro-batch
        (3, {1: [2]}, [1], 2 * 2),  # wrong once, for the next worker's
        (2, {1: [1]}, [1], 2),  # its two results differ
        (1, {0: [2]}, [0], 0),
    ],
)
def test_who_differs_from_itself_or_from_most_is_named(
    workers: int, wrong: dict[int, Any], named: list[int] | None, micro_batch: int
) -> None:
    found = results_of_threads(workers, lambda context: Computer(context, wrong, {}).compare_gradients())
    where = f"computed a different gradient of micro-batch {micro_batch}"
    assert found == [(named, where) if named else None] * workers


def test_fast_kernels_of_gpus_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add in another order each time, so that two healthy GPUs have other bits."""
    monkeypatch.setitem(SMALL, "trainer.reduction", "fast")

    def work(device: str, context: DistributedContext) -> Any:
        context.device = torch.device(device)
        return Computer(context, {1: "always"}, {}).compare_gradients()

    for device, expected in (("cpu", [1]), ("cuda", None)):
        for found in results_of_threads(3, functools.partial(work, device)):
            assert (found and found[0]) == expected


@pytest.mark.parametrize(("workers", "named"), [(3, [1]), (2, [0, 1])])
def test_a_copy_that_has_drifted_is_told_from_a_gradient(workers: int, named: list[int]) -> None:
    found = results_of_threads(workers, lambda context: Computer(context, {}, {1: 2.0}).compare_copies())
    assert found == [(named, "holds a different copy of model.a")] * workers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_the_digest_changes_with_any_bit_of_any_element(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "DIGEST_PIECE", 5)  # the last piece is shorter than those before
    monkeypatch.setattr(strategy, "digest_factors", strategy.digest_factors.__wrapped__)
    content = torch.arange(24 * dtype.itemsize).to(torch.uint8)
    found = {int(digest(content.view(dtype).view(2, 12)))}
    for byte, bit in itertools.product(range(len(content)), range(8)):
        changed = content.clone()
        changed[byte] ^= 1 << bit
        found.add(int(digest(changed.view(dtype).view(2, 12))))
    assert len(found) == 1 + 8 * len(content)


def test_the_digest_tells_elements_that_have_changed_places_or_signs() -> None:
    values = torch.randn(3 * strategy.DIGEST_PIECE)
    others = (values, values.clone(), values.roll(strategy.DIGEST_PIECE), -values, values.flip(0))
    assert len({int(digest(one)) for one in others}) == 4


@pytest.mark.parametrize(
    ("kinds", "kernels", "expected"),
    [
        ("aaa", ("MKL_CBWR=AVX2",) * 3, True),
        ("aab", ("none",) * 3, False),
        ("aaa", ("none", "MKL_CBWR=AVX2", "none"), False),
    ],
)
def test_workers_that_need_not_compute_alike_are_not_compared(
    kinds: str, kernels: tuple[str, ...], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def work(context: DistributedContext) -> bool:
        rank = context.rank
        return Computer(context, {}, {}, kinds[rank], kernels[rank]).is_due()

    assert results_of_threads(3, work) == [expected] * 3
    assert ("what they compute is not compared" in caplog.text) != expected


@pytest.mark.parametrize(
    ("first", "found_at", "suspects"),
    [(7, 11, ["suspect-1-step_00000010"]), pytest.param(0, 1, [], marks=pytest.mark.weekly)],
)
def test_a_worker_that_computes_wrongly_ends_the_job_and_the_next_one_goes_on_before_it(
    first: int,
    found_at: int,
    suspects: list[str],
    start: Start,
    finish: Finish,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    agreed_step = found_at // 2  # the last replay that agreed
    run_dir, program = tmp_path / "run", changed_program(tmp_path, LIE.replace("FIRST", str(first)))
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__replay_every": 5}
    settings["trainer__parallel"] = "fsdp"
    job = start(command(launcher=torchrun(2, restarts=2), program=program, **settings))
    line = error_of(job, code=1)
    assert line.startswith(f"step {found_at}: worker 0 on ") and " or worker 1 on " in line
    history = read_history(run_dir)
    (entry,) = history["distrusted"]
    assert (entry["after"], entry["before_generation"], len(history["generations"])) == (agreed_step, 2, 1)
    assert history["status"] == "failed" and history["durable_step"] == agreed_step
    assert [path.name[:23] for path in (run_dir / "snapshots").glob("suspect-*.json")] == suspects
    again = finish(run_dir=run_dir, trainer__replay_every=5)
    assert f"computed wrongly: nothing that was saved after step {agreed_step} is used" in again.err()
    assert final_hash(run_dir) == final_hash(undisturbed)
