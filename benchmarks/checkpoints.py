"""Checkpoint beside torch.save, torch.distributed.checkpoint (DCP) and the Trainer of Hugging Face.

    python benchmarks/checkpoints.py                    # 124M parameters; 4 GB of disk; half an hour
    python benchmarks/checkpoints.py --size 2 128 --kills 5 # a minute

Needs transformers and accelerate, and root for the full disk. Each way saves a GPT-2 and its AdamW by one
thread on a CPU. Prints rows, as JSON. `wait_s` is how long a step waits for a save, and `durable_s` the time
until all files are on disk: the median of the last four of eight saves. `bytes` is the size of one snapshot.
After a fault in the save of step 2 (a kill, a full disk) or in its largest file (a flipped bit, the second
half missing), a new process loads: the newest snapshot, the one before it, nothing (there is an error
instead), or what was never saved ("wrong").
"""

import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import argument_parser, median_and_spread, row, work_folder
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mingpt.snapshot import Checkpoint

Tell = Callable[[str], None]
SAVES, WARM_UP = 8, 4  # the first saves are made while no old snapshot is removed
OUTCOMES = {1.0: "older", 2.0: "newest"}


class Way:
    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.checkpoint = Checkpoint(folder / "own", keep=2)

    def run(self, steps: int, tell: Tell) -> None:
        for step in range(1, steps + 1):
            fill(self.model, self.optimizer, step)
            tell("begin")
            self.save(step)
            tell("return")
            self.finish(step)
            tell("durable")
            self.clean(step)

    def save(self, step: int) -> None:
        self.checkpoint.save(step, {"model": self.model, "optimizer": self.optimizer})

    def finish(self, step: int) -> None:
        manifest = self.folder / f"own/step_{step:08d}.json"
        while not (manifest.exists() or self.checkpoint.saver.wait(0.002)):
            pass  # `Checkpoint.wait` ends when the old snapshot is removed

    def clean(self, step: int) -> None:
        self.checkpoint.wait()

    def load(self) -> None:
        if self.checkpoint.load({"model": self.model, "optimizer": self.optimizer}) is None:
            raise FileNotFoundError(self.folder)


class TorchSave(Way):
    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / "ckpt.pt")

    def finish(self, step: int) -> None:
        sync(self.folder)

    def load(self) -> None:
        state = torch.load(self.folder / "ckpt.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Dcp(TorchSave):
    def state_of(self) -> dict[str, Any]:
        if not distributed.is_initialized():
            store = distributed.FileStore(str(self.folder.with_suffix(f".store{os.getpid()}")), 1)
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        dcp.save(self.state_of(), checkpoint_id=self.folder / f"step_{step}")

    def clean(self, step: int) -> None:
        shutil.rmtree(self.folder / f"step_{step - 2}", ignore_errors=True)

    def load(self) -> None:
        newest, state = max(self.folder.glob("step_*/.metadata")).parent, self.state_of()
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class DcpAsync(Dcp):
    def save(self, step: int) -> None:
        self.future = dcp.async_save(self.state_of(), checkpoint_id=self.folder / f"step_{step}")

    def finish(self, step: int) -> None:
        self.future.result()  # type: ignore[union-attr]
        sync(self.folder)


class Loaded(Exception):
    """Ends a Trainer that has loaded its state."""


class Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, loop: "TrainerOwn", tell: Tell | None) -> None:
        self.loop, self.tell = loop, tell

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.loop.optimizer = optimizer
        if self.tell is None:
            raise Loaded

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        fill(self.loop.model, self.loop.optimizer, state.global_step)
        if self.tell:
            self.tell("begin")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tell:
            self.tell("return")
            sync(self.loop.folder)
            self.tell("durable")


class TrainerOwn(Way):
    def trainer(self, steps: int, tell: Tell | None) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(self.folder), max_steps=steps, save_steps=1, save_total_limit=2, use_cpu=True,
            report_to=[], disable_tqdm=True, per_device_train_batch_size=1,
        )  # fmt: skip
        window = {"input_ids": [0] * 8, "labels": [0] * 8}
        return Trainer(self.model, arguments, train_dataset=[window] * 8, callbacks=[Watch(self, tell)])

    def run(self, steps: int, tell: Tell) -> None:
        self.trainer(steps, tell).train()

    def load(self) -> None:
        with contextlib.suppress(Loaded):
            self.trainer(SAVES, None).train(resume_from_checkpoint=True)


WAYS: dict[str, type[Way]] = {
    "Checkpoint": Way, "torch.save": TorchSave, "DCP": Dcp, "DCP async": DcpAsync, "Trainer": TrainerOwn,
}  # fmt: skip


def tensors_of(model: torch.nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    return [*model.parameters(), *moments]


@torch.no_grad()
def fill(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    for tensor in tensors_of(model, optimizer):
        tensor.fill_(step)


def sync(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Trial:
    def __init__(self, way: str, folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
        self.way, self.folder, self.model, self.optimizer = way, folder, model, optimizer
        folder.mkdir()

    def in_child(self, work: Callable[[Way], None]) -> int:
        child = os.fork()
        if child == 0:
            # Errors of DCP are no Exceptions.
            with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
                work(WAYS[self.way](self.folder, self.model, self.optimizer))
                os._exit(0)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def save(self, steps: int, kill_after_s: float = 0.0) -> list[tuple[str, float]]:
        """With `kill_after_s`, a signal ends the process so long after the last save has begun."""
        path, happened = self.folder.with_suffix(".json"), list[tuple[str, float]]()
        path.unlink(missing_ok=True)

        def tell(event: str) -> None:
            happened.append((event, time.monotonic()))
            if kill_after_s and event == "begin" and len(happened) == 3 * steps - 2:
                signal.setitimer(signal.ITIMER_REAL, kill_after_s)

        def work(way: Way) -> None:
            try:
                way.run(steps, tell)
            finally:
                path.write_text(json.dumps(happened))

        self.in_child(work)
        return json.loads(path.read_text()) if path.exists() else []

    def load(self) -> str:
        def work(way: Way) -> None:
            fill(way.model, way.optimizer, 0)
            way.load()
            tensors = tensors_of(way.model, way.optimizer)
            value = tensors[0].flatten()[0].item()
            is_one = all(bool((tensor == value).all()) for tensor in tensors)
            path.write_text(OUTCOMES.get(value, "wrong") if is_one else "wrong")

        path = self.folder.with_suffix(".outcome")
        return path.read_text() if self.in_child(work) == 0 else "nothing"

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def clear(self) -> None:
        subprocess.run(["find", str(self.folder), "-mindepth", "1", "-delete"], check=True)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


def measure(trials: Mapping[str, Trial], rounds: int) -> dict[str, float]:
    found: dict[str, dict[str, list[float]]] = {way: {"return": [], "durable": []} for way in trials}
    for number in range(rounds):
        for way in sorted(trials, reverse=number % 2 == 1):
            trials[way].clear()
            events = trials[way].save(SAVES)
            begins = [at for event, at in events if event == "begin"]
            for until, values in found[way].items():
                ends = [at for event, at in events if event == until]
                values += [end - begin for begin, end in zip(begins, ends, strict=True)][WARM_UP:]
    for way, trial in trials.items():
        trial.clear()
        trial.save(1)
        for until, name in (("return", "wait_s"), ("durable", "durable_s")):
            row(way=way, bytes=trial.size(), **median_and_spread(found[way][until], name=name))
    return {way: statistics.median(times["durable"]) for way, times in found.items()}


def damage(trial: Trial, change: Callable[[Path], Any]) -> str:
    trial.clear()
    trial.save(2)
    files = [path for path in trial.folder.rglob("*") if path.is_file()]
    change(max(files, key=lambda path: (path.stat().st_size, path.stat().st_mtime_ns)))
    return trial.load()


def full_disk(trial: Trial) -> str:
    trial.clear()
    trial.save(1)
    size = trial.size()
    trial.clear()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "disk", trial.folder], check=True)
    try:
        has_returned = [event for event, _ in trial.save(2)].count("return") == 2
        return f"{trial.load()}, save {'returned' if has_returned else 'raised'}"
    finally:
        subprocess.run(["umount", trial.folder], check=True)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", type=int, nargs=2, default=(12, 768), metavar=("N_LAYER", "N_EMBD"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no other threads
    with work_folder() as folder:
        layers, width = arguments.size
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64))
        optimizer = torch.optim.AdamW(model.parameters())
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        row(parameters=sum(weight.numel() for weight in model.parameters()))
        trials = {way: Trial(way, folder / way.replace(" ", "-"), model, optimizer) for way in WAYS}
        durable_s = measure(trials, arguments.rounds)
        for way, trial in trials.items():
            outcomes = collections.Counter[str]()
            for number in range(arguments.kills):
                trial.clear()
                trial.save(2, 1.1 * durable_s[way] * (number + 0.5) / arguments.kills)
                outcomes[trial.load()] += 1
            row(way=way, fault="kill", outcomes=dict(outcomes))
            row(way=way, fault="flipped bit", outcome=damage(trial, flip))
            row(
                way=way,
                fault="file cut in half",
                outcome=damage(trial, lambda path: os.truncate(path, path.stat().st_size // 2)),
            )
            row(way=way, fault="full disk", outcome=full_disk(trial))
    return 0


if __name__ == "__main__":
    sys.exit(main())
