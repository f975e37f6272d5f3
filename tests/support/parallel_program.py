"""Trains a small model for two steps with several strategies, on 1 to 4 ranks, and saves the results.

It needs its own process: after a backward pass, the forks of a process may be unable to run backward passes.
"""

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.base.rows import split_rows
from mingpt.config import ModelConfig
from mingpt.data.windows import micro_batch_shares
from mingpt.distributed import DistributedContext
from mingpt.model import GPT, LossModule
from mingpt.parallel import STRATEGIES, Strategy, StrategySetup, ddp
from support import hooked_ddp, odd_models  # noqa: F401 - the first enters itself in STRATEGIES
from support.forks import results_of, share_memory

MICRO_BATCHES, BATCH, LENGTH, VOCABULARY, STEPS = 7, 2, 4, 11, 2
MAX_NORM = 0.05
RANKS, FOUR, ALONE = (1, 2, 3), (1, 2, 3, 4), (1,)


@dataclass(frozen=True)
class Case:
    """A way to train on each number of ranks in `ranks`. (`parallel`, `reduction`) is a key of STRATEGIES."""

    parallel: str = "ddp"
    reduction: str = "exact"
    arch: str = "gpt2"
    dtype: str = "float32"
    shard_optimizer: bool = False
    reshard: bool = True
    recompute: bool = False
    param_dtype: str | None = None
    micro_batches: int = MICRO_BATCHES
    bucket_bytes: int = 4096  # so that a small model has several buckets
    ranks: Sequence[int] = RANKS
    model: str | None = None  # a key of odd_models.MODELS, in the place of `arch`

    @property
    def splits(self) -> bool:
        return self.shard_optimizer or self.parallel == "fsdp"


@dataclass
class Outcome:
    """One rank's results after STEPS steps. All tensors but `held` have the rows that the rank updates."""

    gradients: dict[str, Tensor] = field(default_factory=dict)  # those of the last step, before clipping
    clipped: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    pieces: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)  # the weights as the rank holds them
    eval_loss: float = 0.0


GROUPS: dict[str, dict[str, Case]] = {
    "ddp": {
        "exact": Case(ranks=FOUR),
        "exact, modern": Case(arch="modern", ranks=ALONE),
        "hook": Case(reduction="hook", ranks=FOUR),
        "hook, modern": Case(reduction="hook", arch="modern", ranks=FOUR),
        "fast": Case(reduction="fast"),
        "idle": Case(micro_batches=2, ranks=FOUR),
        "idle fast": Case(micro_batches=2, reduction="fast"),
    },
    "sharded optimizer": {
        "whole": Case(arch="modern"),
        "exact": Case(arch="modern", shard_optimizer=True),
        "fast": Case(arch="modern", shard_optimizer=True, reduction="fast"),
        "whole, gpt2": Case(),
        "exact, gpt2": Case(shard_optimizer=True),
        "whole, idle": Case(micro_batches=2),
        "exact, idle": Case(shard_optimizer=True, micro_batches=2),
    },
    "fsdp": {
        **{
            f"{parallel} {arch} {dtype}": Case(
                parallel, arch=arch, dtype=dtype, ranks=ALONE if parallel == "ddp" else RANKS
            )
            for parallel in ("ddp", "fsdp")
            for arch in ("gpt2", "modern")
            for dtype in ("float32", "bfloat16")
        },
        "fsdp gpt2 float32, kept": Case("fsdp", reshard=False),
        "fsdp gpt2 float32, recomputed": Case("fsdp", recompute=True),
        "fsdp modern bfloat16, recomputed": Case("fsdp", arch="modern", dtype="bfloat16", recompute=True),
        "fsdp gpt2 float32, fast": Case("fsdp", "fast"),
        "fsdp gpt2 float32, one unit": Case("fsdp", bucket_bytes=1 << 20),
        "fsdp modern bfloat16, one unit": Case(
            "fsdp", arch="modern", dtype="bfloat16", recompute=True, bucket_bytes=1 << 20
        ),
        "ddp, idle": Case(micro_batches=2, ranks=ALONE),
        "fsdp, idle": Case("fsdp", micro_batches=2),
        "narrow": Case("fsdp", param_dtype="bfloat16"),
    },
    "own models": {
        f"{model}, {name}": replace(case, model=model)
        for model in odd_models.MODELS
        for name, case in {
            "ddp": Case(),
            "sharded": Case(shard_optimizer=True),
            "hook": Case(reduction="hook"),
            "fast": Case(reduction="fast"),
            "fsdp": Case("fsdp"),
        }.items()
        if (model, name) != ("unusual", "fsdp")
    }
    | {
        "experts, idle": Case(micro_batches=2, model="experts"),
        "experts, idle fast": Case(micro_batches=2, reduction="fast", model="experts"),
    },
}


def make_strategy(case: Case, context: DistributedContext) -> tuple[GPT, Strategy]:
    """The weights' values depend neither on the number of ranks nor on the strategy."""
    if case.model:
        odd_models.register(case.model)
    config = ModelConfig(arch=case.arch, n_layer=2, n_head=2, n_embd=20, dropout=0.1)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = GPT(config, vocab_size=VOCABULARY, block_size=LENGTH)
    if case.recompute:
        model.set_recompute(True)
    make = STRATEGIES[case.parallel, case.reduction]
    count, ranks = case.micro_batches, context.world_size
    parts = micro_batch_shares(count, ranks)
    if make.takes_turns:
        parts = [range(rank, count, ranks) for rank in range(ranks)]
    setup = StrategySetup(
        model,
        parts,
        context,
        list(model.h),
        torch.zeros(2, BATCH, LENGTH, dtype=torch.long).unbind(),
        shard_optimizer=case.shard_optimizer,
        reshard=case.reshard,
        param_dtype=torch.bfloat16 if case.param_dtype else None,
        autocasts=functools.partial(autocast, case),
    )
    ddp.BUCKET_BYTES = case.bucket_bytes
    strategy = make(setup)
    model.init_buffers()
    for name, weight in strategy.held_weights().items():
        whole = model.draw_weight(name, strategy.shapes[name], seed=5)
        whole += torch.linspace(-0.1, 0.1, whole.numel()).view_as(whole)  # so that no weight begins at zero
        weight.copy_(strategy.take_rows(name, whole, context.rank) if strategy.weights_are_sharded else whole)
    strategy.prepare(LossModule(model))
    return model, strategy


def autocast(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, case.dtype))


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def run_step(case: Case, strategy: Strategy, step: int) -> None:
    strategy.start_step()
    for number in strategy.my_micro_batches:
        torch.manual_seed(100 * step + number)  # as the trainer does, for dropout
        with strategy.micro_batch(number):
            with autocast(case):
                loss = strategy.forward(*make_batch(100 * step + number))
            (loss * strategy.loss_factor).backward()
    strategy.finish_step()


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def train(case: Case, context: DistributedContext) -> Outcome:
    model, strategy = make_strategy(case, context)
    outcome = Outcome()
    for step in range(STEPS):
        run_step(case, strategy, step)
        gradients = strategy.gradients()
        outcome.gradients = clone(gradients)
        outcome.norm = float(strategy.clip_grad_norm_(MAX_NORM))
        outcome.clipped = clone(gradients)
        for name, piece in strategy.pieces().items():
            piece.sub_(gradients[name])
        del gradients
        strategy.finish_update()
    outcome.pieces, outcome.held = clone(strategy.pieces()), clone(strategy.held_weights())
    model.eval()
    with torch.no_grad(), autocast(case):
        outcome.eval_loss = float(model(*make_batch(1000))[1])
    return outcome


def train_all(cases: dict[str, Case], context: DistributedContext) -> dict[str, Outcome]:
    share_memory(context)
    return {name: train(case, context) for name, case in cases.items()}


Tensors = dict[str, Tensor]
Results = dict[int, list[dict[str, Outcome]]]  # {number of ranks: [{case: outcome}, by rank]}


@functools.cache
def run_program(group: str) -> Results | str:
    """Return a group's results, or the program's stderr if it fails or warns."""
    tests = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, "-m", "support.parallel_program", output.name, group]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or "Warning" in done.stderr:
            return done.stderr
        results: Results = pickle.load(output)
    return results


def outcomes_of(group: str, case: str) -> list[list[Outcome]]:
    results = run_program(group)
    assert isinstance(results, dict), results
    return [[of_rank[case] for of_rank in ranks] for ranks in results.values() if case in ranks[0]]


def whole(pieces: Sequence[Tensors]) -> Tensors:
    return {
        name: torch.cat([part[name] for part in pieces]) if first.ndim else first
        for name, first in pieces[0].items()
    }


def assert_equal(mine: Tensors, expected: Tensors) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, expected[name]), name


def assert_close(mine: Tensors, expected: Tensors) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def assert_same(case: Case, outcomes: Sequence[Outcome], expected: Outcome) -> None:
    """Assert that the ranks, put together if the case splits updates, have the results of one rank."""
    for part in ("gradients", "clipped", "pieces"):
        found: list[Tensors] = [getattr(outcome, part) for outcome in outcomes]
        for mine in [whole(found)] if case.splits else found:
            assert_equal(mine, getattr(expected, part))
    for rank, outcome in enumerate(outcomes):
        assert (outcome.norm, outcome.eval_loss) == (expected.norm, expected.eval_loss)
        for name, all_rows in expected.pieces.items():
            if case.splits and all_rows.ndim:
                count = len(split_rows(len(all_rows), len(outcomes))[rank])
                assert len(outcome.pieces[name]) == len(outcome.gradients[name]) == count, name
        assert_equal(outcome.held, outcome.pieces if case.parallel == "fsdp" else expected.held)


def main(output: Path, group: str) -> None:
    import torch._dynamo  # imported once, before the forks, so that no fork has to
    import torch.distributed.fsdp  # noqa: F401

    results = {}
    for ranks in sorted({ranks for case in GROUPS[group].values() for ranks in case.ranks}):
        cases = {name: case for name, case in GROUPS[group].items() if ranks in case.ranks}
        results[ranks] = results_of(ranks, functools.partial(train_all, cases), timeout_s=110)
    output.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    # Imported under its own name, so that the results can be unpickled elsewhere.
    from support import parallel_program

    parallel_program.main(Path(sys.argv[1]), sys.argv[2])
