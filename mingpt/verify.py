"""Prove the promise on this machine: python -m mingpt.verify [--kills 10] [--workers 1,2,3,4] [--seed 1]

Trains a small model undisturbed, then again while its workers are killed at seeded moments (start-up, forward, inside the reduction,
evaluation, in the middle of a save) and their number changes, all under torchrun. Then compares: the final tensors, bit for bit; the loss
curves; and the hashes of the tokens that the workers were fed with those that configuration and text alone call for. Exit code 0 if all is
identical, 1 with the seed that broke it otherwise. `--break` spoils the disturbed run on purpose, to show that verify can tell.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingpt.cluster import Cluster
from mingpt.config import Config, build
from mingpt.job import work
from mingpt.launch import Launch

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parent.parent
PHASES = ("start-up", "forward", "reduction", "evaluation", "save")
STEPS, SPOILED_STEP = 48, 40
SETTINGS = {
    "data.block_size": 32, "data.val_fraction": 0.1, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32, "model.dropout": 0.1,
    "trainer.max_steps": STEPS, "trainer.batch_size": 8, "trainer.micro_batch_size": 1, "trainer.eval_every": 8, "trainer.log_every": 1,
    "trainer.sample_tokens": 0, "trainer.device": "cpu", "trainer.timeout_s": 60, "snapshot.every": 4, "snapshot.keep_last": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Worker `rank` (modulo their number) gets SIGKILL in this phase of the first step from `step` on; then `workers` go on."""

    phase: str
    step: int
    rank: int
    workers: int


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    tensors: str  # SHA-256 of the last snapshot's tensor file
    audit: str
    records: list[dict[str, float]]  # without what measures time


def schedule(seed: int, kills: int, workers: list[int]) -> list[Kill]:
    """Seeded kills in the order of their steps; between two of them a snapshot can be written."""
    dice = random.Random(seed)
    steps = sorted(int((number + dice.random()) * (STEPS - 2) / kills) for number in range(kills))
    return [Kill(dice.choice(PHASES), step, dice.randrange(8), dice.choice(workers)) for step in steps]


def train(folder: Path, workers: int, kills: list[Kill], settings: dict[str, Any], spoil: str = "") -> None:
    """A whole run, killed as planned. Each change of the number of workers is a new launch of torchrun. Raises RuntimeError if one fails."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"kills": [asdict(kill) for kill in kills], "spoil": spoil}))
    done = 0
    while True:
        same = next((number for number in range(done, len(kills)) if kills[number].workers != workers), len(kills))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", f"--max-restarts={len(kills) + 1}"]
        given = [f"{key}={value}" for key, value in (settings | {"run_dir": folder / "run"}).items()]
        with open(folder / "job.log", "ab") as log:
            job = subprocess.Popen([*command, "-m", "mingpt.verify", "--worker", str(folder), *given], cwd=ROOT, stdout=log, stderr=log)
        while job.poll() is None and not (same < len(kills) and (folder / f"killed-{same}").exists()):
            time.sleep(0.02)
        if job.poll() is None:  # the kill after which another number of workers goes on
            orphans = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
            job.kill()
            job.wait()
            while any(alive(pid) for pid in orphans):  # they notice that their agent is gone
                time.sleep(0.02)
            done, workers = same + 1, kills[same].workers
        elif job.returncode == 0:
            return
        else:
            raise RuntimeError(f"torchrun ended with code {job.returncode}:\n{(folder / 'job.log').read_text()[-3000:]}")


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outcome(folder: Path, config: Config) -> Outcome:
    name = folder / "run" / "snapshots" / f"step_{config.trainer.max_steps:08d}"
    manifest = json.loads(name.with_suffix(".json").read_text())
    tensors = hashlib.sha256(name.with_suffix(".safetensors").read_bytes()).hexdigest()
    timed = ("step_s", "data_s", "tokens_per_s")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]
    if tensors != manifest["sha256"]:
        raise RuntimeError(f"{name}.safetensors has SHA-256 {tensors[:16]}... and its manifest says {manifest['sha256'][:16]}...")
    return Outcome(tensors, manifest["audit"], records)


def generations(folder: Path, kills: list[Kill]) -> Iterator[str]:
    """A line on each generation that came as far as training."""
    for number, entry in enumerate(json.loads((folder / "run" / "run.json").read_text())["generations"]):
        yield f"  generation {number}: {entry['workers']} workers, steps {entry['from_step']} to {entry['to_step']}, {entry['end']}"
    hit = [kill for number, kill in enumerate(kills) if (folder / f"killed-{number}").exists()]
    yield f"  {len(hit)} of {len(kills)} kills hit: " + ", ".join(f"{kill.phase} ({kill.step})" for kill in hit)


def problems(
    seed: int, kills: list[Kill], workers: list[int], work: Path, reference: Outcome, config: Config, spoil: str = ""
) -> tuple[list[str], list[str]]:
    """Train disturbed; returns what is wrong, if anything, and the lines of the story."""
    folder = work / f"seed-{seed}"
    try:
        train(folder, workers[0], kills, SETTINGS | {"data.path": config.data.path}, spoil)
        story = list(generations(folder, kills))
        if spoil == "byte":
            path = folder / "run" / "snapshots" / f"step_{STEPS:08d}.safetensors"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        result = outcome(folder, config)
    except (RuntimeError, OSError) as error:
        return [str(error)], []
    wrong = []
    if missed := [number for number in range(len(kills)) if not (folder / f"killed-{number}").exists()]:
        wrong.append(f"kills {missed} hit no living worker")
    if result.tensors != reference.tensors:
        wrong.append(f"the final tensors differ: {reference.tensors[:16]} undisturbed, {result.tensors[:16]} disturbed")
    if result.records != reference.records:
        wrong.append("the recorded losses differ")
    if result.audit != expected_audit(config):
        wrong.append("the workers were fed other tokens than configuration and text call for")
    shutil.rmtree(folder)
    return wrong, [*story, f"  disturbed    {result.tensors}"]


def expected_audit(config: Config) -> str:
    """From the configuration and the text alone; also checks that every window of every epoch is dealt exactly once."""
    from mingpt.audit import each_window_once, recompute
    from mingpt.data import prepare, read_bytes

    dataset = prepare(read_bytes(config.data), config.data).train
    epochs = 1 + STEPS * config.trainer.batch_size * dataset.block_size // len(dataset.tokens)
    assert each_window_once(config, dataset, epochs), "an epoch does not deal every window once"
    return recompute(config, dataset, config.trainer.max_steps)


def prepare_work(work: Path) -> tuple[Config, Outcome]:
    """The undisturbed run, by one worker, over the first characters of the embedded text: a few epochs of it."""
    text = work / "text.txt"
    text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:5000])
    config = build(SETTINGS | {"data.path": str(text)})
    train(work / "undisturbed", 1, [], SETTINGS | {"data.path": str(text)})
    return config, outcome(work / "undisturbed", config)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mingpt.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--workers", type=lambda text: [int(count) for count in text.split(",")], default=[1, 2, 3, 4], help="numbers of workers, 1 to 8"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--break", dest="spoil", choices=["window", "sum", "byte"], default="", help="spoil the disturbed run on purpose")
    arguments = parser.parse_args()
    if arguments.kills < 1 or not arguments.workers or not all(1 <= count <= 8 for count in arguments.workers):
        parser.error("--kills must be at least 1 and --workers numbers from 1 to 8, such as 1,2,4")
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        config, reference = prepare_work(Path(folder))
        say(f"undisturbed: 1 worker, {STEPS} steps, {time.monotonic() - began:.0f} s")
        kills = schedule(arguments.seed, arguments.kills, arguments.workers)
        wrong, story = problems(arguments.seed, kills, arguments.workers, Path(folder), reference, config, arguments.spoil)
    for line in [*story, f"  undisturbed  {reference.tensors}"]:
        say(line)
    say(f"seed {arguments.seed} broke it: " + "; ".join(wrong) if wrong else f"identical ({time.monotonic() - began:.0f} s)")
    return 1 if wrong else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# What follows runs in the workers.


def worker(folder: Path, argv: list[str]) -> None:
    """train.py, with a trainer that kills itself as planned."""
    plan = json.loads((folder / "plan.json").read_text())

    def read() -> Config:
        launch = Launch.from_environment()
        strike(folder, plan, "start-up", launch.rank, launch.world_size, STEPS)
        return build(dict(word.split("=", 1) for word in argv))

    work(read, lambda config, cluster: victim(folder, plan)(config, cluster))


def strike(folder: Path, plan: dict[str, Any], phase: str, rank: int, workers: int, step: int) -> None:
    """Die here if the next kill of the plan says so; a mark that outlives the process tells that it did."""
    number = next((number for number in range(len(plan["kills"])) if not (folder / f"killed-{number}").exists()), None)
    if number is None:
        return
    kill = Kill(**plan["kills"][number])
    wanted = 0 if phase == "save" else kill.rank % workers  # rank 0 alone saves
    # A start-up has no step: it follows the kill before it.
    if kill.phase == phase and step >= kill.step and rank == wanted:
        (folder / f"killed-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def victim(folder: Path, plan: dict[str, Any]) -> Any:
    """A trainer that meets its death in each of the phases."""
    from mingpt import audit
    from mingpt.trainer import Trainer

    class Victim(Trainer):
        def __init__(self, config: Config, cluster: Cluster) -> None:
            super().__init__(config, cluster)
            put = self.folder.put

            def put_half(name: str, content: bytes | memoryview) -> None:
                if name.endswith(".safetensors"):
                    Path(self.folder.path(f"partial-{name}")).write_bytes(content[: len(content) // 2])
                    self.strike("save")
                put(name, content)

            self.folder.put = put_half  # type: ignore[method-assign]
            if self.tree:
                hook = self.tree.exchange.sum_up

                def sum_up(buffer: "Tensor", parts: list["Tensor"]) -> None:
                    self.strike("reduction")
                    hook(buffer, parts)

                self.tree.exchange.sum_up = sum_up  # type: ignore[method-assign]

        def strike(self, phase: str) -> None:
            strike(folder, plan, phase, self.cluster.rank, self.cluster.world_size, self.steps)

        def accumulate(self, micro_batch: int, inputs: "Tensor", targets: "Tensor") -> None:
            self.strike("forward")
            if self.cluster.world_size == 1 and micro_batch == self.mine[-1]:
                self.strike("reduction")  # a single worker's is the folding of its own parts
            if plan["spoil"] == "window" and self.steps == SPOILED_STEP and micro_batch == 0:
                inputs, targets = self.corpus.train[0]
                inputs, targets = inputs.unsqueeze(0), targets.unsqueeze(0)
                self.digests[0] = audit.digest(inputs, targets)
            super().accumulate(micro_batch, inputs, targets)
            if plan["spoil"] == "sum" and self.steps == SPOILED_STEP and self.tree and len(self.tree.stack) == 3:
                # (a + b) + (c + d) and so on become a sum in another order: two partial sums change places.
                (one, two) = self.tree.stack[0][2], self.tree.stack[2][2]
                for left, right in zip(one, two, strict=True):
                    kept = left.clone()
                    left.copy_(right)
                    right.copy_(kept)

        def evaluate(self) -> dict[str, float]:
            self.strike("evaluation")
            return super().evaluate()

    return Victim


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
