"""Prove that kills change no bit: python -m mingpt verify [--kills 10] [--workers 1,2,3,4] [--seed 1]

The command trains a small model undisturbed, then again while workers are killed, both under torchrun. Kills
come at random but seeded moments: at start-up, in the forward pass, inside the reduction, in an evaluation,
in the middle of a save. After a kill the number of workers and the strategy may change. The command compares
the final tensors, bit for bit, and the loss curves of the two runs. It also checks that the workers used the
tokens that the configuration and the text determine, and no window twice in an epoch. Exit code 0: all is
identical, and each kill hit a worker; 1: something differs or fails, or a kill hit no worker, and the last
line names the seed; 2: a mistake in the options, or the undisturbed run fails. Ten kills take one to three
minutes on two CPU cores. Settings such as model.arch=gpt2 change the model.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import temporary_folder
from mingpt.config import Config, DataConfig, project_folder
from mingpt.config.cli import build
from mingpt.data import make_corpus, read_bytes
from mingpt.report.history import plural
from mingpt.snapshot import Manifest, Store
from mingpt.tools.compare import compare, read_run
from mingpt.tools.fault_injection import BATCHES, STEPS, Kill, digest, marker
from mingpt.tools.jobs import ROOT, clean_environment, torchrun
from mingpt.training.run import make_sampler

PHASES = ("start-up", "forward", "reduction", "evaluation", "save")
SETTINGS = {
    "data.block_size": 32, "data.val_fraction": 0.1, "model.n_layer": 2, "model.n_head": 2,
    "model.n_embd": 32, "model.dropout": 0.1, "trainer.max_steps": STEPS, "trainer.batch_size": 8,
    "trainer.micro_batch_size": 1,
    "trainer.eval_every": 8, "trainer.log_every": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 60, "snapshot.every": 4, "snapshot.keep_last": 3,
}  # fmt: skip
OWN_SETTINGS = {"run_dir", "data.path", "trainer.max_steps", "trainer.pause_after", "snapshot.path"}
# Like the number of workers, these settings may change between generations; they change no bit.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"trainer.parallel": "ddp", "trainer.shard_optimizer": False},
    "ddp, sharded optimizer": {"trainer.parallel": "ddp", "trainer.shard_optimizer": True},
    "fsdp": {"trainer.parallel": "fsdp"},
}


def make_schedule(seed: int, kills: int, workers: list[int]) -> list[Kill]:
    """Draw `kills` kills with the random seed `seed`; return them in the order of their steps.

    The first STEPS - 2 steps are divided into `kills` equal parts, with one kill in each part. After each
    kill the job has a number of workers drawn from `workers`, and a strategy drawn from STRATEGIES. Kills 0
    to 4 have five different phases, and so have kills 5 to 9, and so on.
    """
    rng = random.Random(seed)
    steps = sorted(int((number + rng.random()) * (STEPS - 2) / kills) for number in range(kills))
    phases = list[str]()
    while len(phases) < kills:
        phases += rng.sample(PHASES, len(PHASES))
    return [
        Kill(phase, step, rng.randrange(8), rng.choice(workers), rng.choice(list(STRATEGIES)))
        for phase, step in zip(phases, steps, strict=False)
    ]


def train(folder: Path, workers: int, kills: list[Kill], settings: dict[str, Any]) -> None:
    """Train a whole run in `folder`/run while `kills` are done; begin with `workers` workers under ddp.

    `folder` must not exist. `settings` has the run's settings. After a kill that changes neither the number
    of workers nor the strategy, torchrun restarts the workers. After any other kill torchrun ends, and this
    function starts torchrun again. Each time that torchrun has ended, stderr gets the kills that were done.
    A kill that hits no worker leaves no `marker` file. Raises RuntimeError, with the end of torchrun's
    stderr, if torchrun fails for a reason other than a kill.
    """
    folder.mkdir(parents=True)
    (folder / "kills.json").write_text(json.dumps(kills))
    done, strategy = 0, "ddp"
    while True:
        last = done  # torchrun itself restarts the workers after the kills before this one
        same = (workers, strategy)
        while last < len(kills) and (kills[last].next_workers, kills[last].next_strategy) == same:
            last += 1
        own = STRATEGIES[strategy] | {"run_dir": folder / "run"}
        given = [f"{key}={value}" for key, value in (settings | own).items()]
        program = ["-m", "mingpt.tools.fault_injection", str(folder), *given]
        with open(folder / "job.err", "ab") as err:
            command = [*torchrun(workers, last - done), *program]
            job = subprocess.run(
                command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=err
            )
        for number in range(done, min(last + 1, len(kills))):
            if marker(folder, number).exists():
                kill, pid = kills[number], marker(folder, number).read_text()
                then = f"then went on with {plural(kill.next_workers, 'worker')}, {kill.next_strategy}"
                sys.stderr.write(f"killed pid {pid} in {kill.phase}, from step {kill.step} on; {then}\n")
        if job.returncode == 0:
            return
        if last == len(kills) or not marker(folder, last).exists():
            said = (folder / "job.err").read_text()[-3000:]
            raise RuntimeError(f"torchrun ended with code {job.returncode}:\n{said}")
        done = last + 1
        workers, strategy = kills[last].next_workers, kills[last].next_strategy


def find_problems(
    seed: int, kills: list[Kill], workers: int, work: Path, settings: dict[str, Any]
) -> tuple[list[str], str | None]:
    """Train a run that `kills` disturb, and compare it with the undisturbed run, both in the folder `work`.

    Returns (the problems that were found, the SHA-256 of the disturbed run's last snapshot). If a run cannot
    be trained or read, that is a problem, and the SHA-256 is None. Otherwise the disturbed run's folder is
    removed. `workers` is the number of workers at the beginning. `seed` only names the run's folder.
    """
    config, folder = build(settings), work / f"seed-{seed}"
    try:
        train(folder, workers, kills, settings)
        found = compare(read_run(str(work / "undisturbed" / "run")), read_run(str(folder / "run")))
        last = last_manifest(folder)
    except (RuntimeError, OSError, CorruptSnapshot, UnreadableSnapshot, UserError) as error:
        return [str(error)], None
    problems = [*found.differences, *found.not_compared]
    missed = [number for number in range(len(kills)) if not marker(folder, number).exists()]
    if missed:
        problems.append(f"kills {missed} hit no living worker")
    problems += find_wrong_tokens(folder, config)
    shutil.rmtree(folder)
    return problems, last.sha256


def find_wrong_tokens(folder: Path, config: Config) -> list[str]:
    """Return what is wrong with the tokens that the workers in `folder` used, a sentence for each problem.

    The workers recorded what they used in BATCHES. A step that was computed again must have the same tokens.
    """
    trainer, dataset = config.trainer, make_corpus(read_bytes(config.data), config.data).train
    sampler = make_sampler(config, dataset, 1, 0, takes_turns=False)
    starts = sampler.window_starts(0, STEPS * trainer.batch_size)
    problems = []
    epochs = [starts[first : first + len(sampler)].tolist() for first in range(0, len(starts), len(sampler))]
    if any(len(set(epoch)) < len(epoch) for epoch in epochs):
        problems.append("a window comes twice in an epoch")
    micro_batches = trainer.batch_size // trainer.micro_batch_size
    expected = set()
    for number, windows in enumerate(starts.reshape(-1, trainer.micro_batch_size).tolist()):
        expected.add((*divmod(number, micro_batches), digest(*dataset.__getitems__(windows))))
    used = {tuple(json.loads(line)) for line in (folder / BATCHES).read_text().splitlines()}
    if used != expected:
        problems.append("the workers used other tokens than configuration and text determine")
    return problems


def last_manifest(folder: Path) -> Manifest:
    """Return the manifest of the last snapshot of `folder`/run, at step STEPS.

    Raises CorruptSnapshot if the manifest is missing or damaged, UnreadableSnapshot if it cannot be read.
    """
    return Store(str(folder / "run" / "snapshots")).read_manifest(STEPS)


def train_undisturbed(work: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Train the undisturbed run, of one worker, on 5000 bytes of data/input.txt; return its settings.

    The run is in `work`/undisturbed/run. `words` are settings, section.key=value, which replace or extend
    SETTINGS. Raises UserError for a wrong setting, for a setting that verify sets itself, and if the text
    cannot be read or the run cannot be trained.
    """
    text = work / "text.txt"
    source = DataConfig(str((project_folder() or ROOT) / "data/input.txt"))
    text.write_bytes(read_bytes(source)[:5000])
    given = dict(word.partition("=")[::2] for word in words)
    for key in sorted(OWN_SETTINGS & given.keys()):
        raise UserError(f"verify sets {key} itself")
    settings = SETTINGS | {"data.path": str(text)} | given
    build(settings)  # raises UserError
    try:
        train(work / "undisturbed", 1, [], settings)
    except RuntimeError as error:
        raise UserError(f"the undisturbed run cannot be trained: {error}") from None
    return settings


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt verify", __doc__)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--workers", default="1,2,3,4", help="numbers of workers, 1 to 8 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    counts = [int(count) if count.isdecimal() else 0 for count in options.workers.split(",")]
    if options.kills < 1 or not all(1 <= count <= 8 for count in counts):
        parser.error("--kills must be at least 1 and --workers numbers from 1 to 8, such as 1,2,4")
    with temporary_folder() as name:
        work, began = Path(name), time.monotonic()
        settings = train_undisturbed(work, options.settings)
        write_lines([f"undisturbed: 1 worker, {STEPS} steps, {time.monotonic() - began:.0f} s"])
        kills = make_schedule(options.seed, options.kills, counts)
        problems, digest = find_problems(options.seed, kills, counts[0], work, settings)
        undisturbed = last_manifest(work / "undisturbed").sha256
        write_lines([f"  disturbed    {digest}", f"  undisturbed  {undisturbed}"])
    took = f"({time.monotonic() - began:.0f} s)"
    write_lines([f"seed {options.seed} broke it: {'; '.join(problems)}" if problems else f"identical {took}"])
    return 1 if problems else 0
