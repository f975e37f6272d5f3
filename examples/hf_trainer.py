"""Hugging Face's Trainer with snapshots of this project: a killed job goes on exactly where it was saved.

    python examples/hf_trainer.py
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/hf_trainer.py

This project must be on PYTHONPATH, or installed, and `pip install transformers accelerate`. The last line of
output, a hash of the weights, is the same whatever was killed or stopped, for a fixed number of workers.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mingpt.data import ElasticSampler
from mingpt.distributed import StopSignal
from mingpt.snapshot import Checkpoint

STEPS, BATCH, SAVE_EVERY = 200, 8, 20  # BATCH is that of all workers


class Stream(IterableDataset[Any]):
    """The samples of all steps, from sample number `seen` on, in an order that `seed` determines."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seen = data, 0
        self.sampler = ElasticSampler(data, batch_size=BATCH, micro_batch_size=BATCH, seed=seed)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.seek(self.seen)
        for _, index in zip(range(self.seen, STEPS * BATCH), self.sampler, strict=False):
            yield self.data[index]


class Snapshots(TrainerCallback):
    """Loads the newest snapshot in the folder `where` when training begins, and saves snapshots there."""

    def __init__(self, where: str, stream: Stream) -> None:
        self.where, self.stream = where, stream

    def on_train_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **kwargs):  # type: ignore
        self.stop, self.checkpoint = StopSignal(), Checkpoint(self.where, keep=2)
        self.state = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler, "history": []}
        state.global_step = self.checkpoint.load(self.state) or 0
        state.log_history, self.stream.seen = self.state["history"], state.global_step * BATCH

    def on_step_begin(self, args, state, control, **kwargs):  # type: ignore
        torch.manual_seed(args.seed + state.global_step * args.world_size + args.process_index)  # dropout

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore
        is_end = bool(self.stop.agreed()) or state.global_step >= state.max_steps
        if is_end or state.global_step % SAVE_EVERY == 0:
            self.checkpoint.save(state.global_step, self.state | {"history": state.log_history})
        control.should_training_stop |= is_end

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore
        self.checkpoint.wait()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (500, 17), generator=generator).cumsum(1) % 50
    stream = Stream([{"input_ids": row, "labels": row} for row in tokens], seed=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=17, n_embd=32, n_layer=2, n_head=2))
    workers = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        output_dir="hf_trainer", max_steps=STEPS, per_device_train_batch_size=BATCH // workers, use_cpu=True,
        learning_rate=1e-3, logging_steps=50, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=stream, callbacks=[Snapshots("hf_trainer", stream)])
    trainer.train()
    if trainer.is_world_process_zero() and trainer.state.global_step == STEPS:
        content = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("weights", hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
