"""A worker that computes wrongly without an error: is it found at the next replay, and named?

    python benchmarks/replay.py                      # 26 lies, 20 honest jobs; an hour on two cores; Linux
    python benchmarks/replay.py --kinds once --honest 0

The last worker computes wrongly ("lies") in a job of 100 steps, with a replay every 20 steps:

- `bit`, or `two` with two workers: from step 57 on, gradients of a block's output have one wrong bit.
- `once`: one bit is wrong once, in the first micro-batch that the worker replays at step 60.
- `copy`: one bit of a weight changes at step 57, or at 60 with a sharded optimizer.

In step 61 the job must end with exit code 1 and name only the liar; with two workers, both. Then the same
command must finish the run without the lie, and exact reduction must give the hash of an undisturbed run.
Honest jobs must finish. Prints a row per job, as JSON. Exit code 1 if a condition does not hold.
"""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import common
import torch

from mingpt.base import events

SETTINGS = common.SMALL | {
    "trainer.max_steps": 100, "trainer.replay_every": 20, "trainer.eval_every": 50, "snapshot.every": 10,
    "snapshot.memory_every": 5, "model.dropout": 0.1,
}  # fmt: skip
NAMES = list(common.STRATEGIES)
KINDS = {  # (workers, strategy, reduction) of each job
    "bit": [(workers, name, how) for name in NAMES for how in ("exact", "fast") for workers in (3, 4)],
    "two": [(2, "ddp", "exact"), (2, "fsdp", "exact"), (2, "sharded", "exact"), (2, "fsdp", "fast")],
    "once": [(workers, name, "exact") for name in NAMES for workers in (3, 4)],
    "copy": [(workers, name, "exact") for name in ("ddp", "sharded") for workers in (2, 3)],
}


def flip_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
    return tensor


def lie(kind: str) -> None:
    told = list[int]()

    def on_run_start(state: Any, strategy: Any) -> None:
        if strategy.rank < strategy.world_size - 1:
            return

        def on_output(module: Any, inputs: Any, output: torch.Tensor) -> None:
            is_time = state.step == 60 and not told if kind == "once" else state.step >= 57
            if kind != "copy" and is_time and output.requires_grad:
                told.append(state.step)
                output.register_hook(lambda gradient: flip_bit(gradient.clone()))

        def on_step_start(step: int) -> None:
            if kind == "copy" and step == (60 if strategy.updates_are_sharded else 57):
                flip_bit(state.model.wte.weight.data)

        state.model.h[0].register_forward_hook(on_output)
        events.subscribe("step_start", on_step_start)

    events.subscribe("run_start", on_run_start)


def try_lie(folder: Path, kind: str, case: tuple[int, str, str], expected: str, tally: common.Tally) -> None:
    workers, strategy, reduction = case
    settings = SETTINGS | common.STRATEGIES[strategy] | {"trainer.reduction": reduction}
    name = "-".join(map(str, (kind, *case)))
    run_dir, program = folder / name, common.changed_program(folder, f"import replay; replay.lie({kind!r})")
    liar = common.start(run_dir, settings, workers=workers, restarts=2, program=program)
    codes = [liar.wait(600)]
    sentence = next((line for line in liar.err().splitlines() if " is not made" in line), "")
    named = [int(rank) for rank in re.findall(r"worker (\d+) on", sentence)]
    again = common.start(run_dir, settings, workers=workers)
    codes.append(again.wait(600))
    set_aside = sorted({path.name.split(".")[0] for path in (run_dir / "snapshots").glob("suspect-*")})
    is_named = "step 61:" in sentence and named == ([0, 1] if workers == 2 else [workers - 1])
    good = codes == [1, 0] and is_named and (reduction == "fast" or common.short_hash(run_dir) == expected)
    tally.add(good, liar, again)
    common.row(lie=name, ok=good, named=named, codes=codes, set_aside=set_aside, sentence=sentence)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of lies (default: %(default)s)")
    parser.add_argument("--honest", type=int, default=20, help="honest jobs (default: %(default)s)")
    options = parser.parse_args()
    tally = common.Tally()
    with common.work_folder() as folder:
        expected = common.train_undisturbed(folder, SETTINGS, "trainer.replay_every=0")
        for kind in filter(None, options.kinds.split(",")):
            for case in KINDS[kind]:
                try_lie(folder, kind, case, expected, tally)
        with common.busy_processes(2) if options.honest else contextlib.nullcontext():
            for number in range(options.honest):
                more = common.STRATEGIES[NAMES[number % 3]] | {"trainer.compile": number % 2 == 1}
                words = [word.lower() for word in common.arguments_of(more)]
                job = common.start(folder / f"honest-{number}", SETTINGS, *words, "trainer.max_steps=500")
                code = job.wait(1200)
                tally.add(code == 0, job)
                common.row(honest=number, ok=code == 0, words=words)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
