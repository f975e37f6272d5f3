"""The loop: a run is a function of its configuration, whoever computes it.

A step is `batch_size / micro_batch_size` micro-batches, shared among the workers. What a micro-batch is made of, its windows
and its dropout, depends on (seed, step, micro-batch) alone, so the whole state of a run between two steps is the model, the
optimizer and one integer, the windows dealt so far. That is what a snapshot holds.
"""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from mingpt import resume
from mingpt.cluster import Cluster
from mingpt.config import Config, UserError, dump, to_dict
from mingpt.data import Corpus, prepare, read_bytes
from mingpt.generate import generate
from mingpt.ledger import Ledger
from mingpt.metrics import Metrics, Picture, Progress, open_log, peak_flops, replace_file
from mingpt.model import GPT
from mingpt.optim import Optimizer, learning_rate
from mingpt.sampler import ElasticSampler, mix
from mingpt.snapshot import Snapshot, Writer

log = logging.getLogger(__name__)


class OutOfMemory(RuntimeError):
    """A micro-batch does not fit into memory."""


class Trainer:
    """One worker's part of a run. Construct it on every worker, then call `run` once."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self.config, self.cluster, self.main = config, cluster, cluster.rank == 0
        self.run_dir = cluster.all_or_none(lambda: make_run_dir(config))
        open_log(self.run_dir if self.main else None)
        self.corpus = read_corpus(config, cluster)
        self.folder = cluster.all_or_none(lambda: resume.open_folder(config, cluster))
        snapshot, self.changes = resume.newest_snapshot(self.folder, cluster), []
        if not cluster.admitted():
            self.changes = resume.check(snapshot, config, self.folder.url, self.corpus.fingerprint)
        if snapshot:
            cluster.use_threads(snapshot.manifest["software"]["threads"])
        self.dtype = arithmetic(config.trainer.dtype, cluster.device)
        self.build(snapshot)
        if self.main:
            cluster.admit()

    def build(self, snapshot: Snapshot | None) -> None:
        """Model, optimizer and sampler, as the snapshot left them or as the seed makes them."""
        config, device = self.config, self.cluster.device
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, vocab_size=len(self.corpus.vocabulary), block_size=config.data.block_size)
        if snapshot:
            resume.load_weights(self.model, snapshot.part("model."), f"the snapshot of step {snapshot.manifest['step']}")
        elif config.snapshot.init_from:
            self.cluster.all_or_none(lambda: resume.init_from(self.model, str(config.snapshot.init_from), self.corpus.vocabulary))
        self.model.to(device)
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.step = self.windows = 0
        if snapshot:
            self.step, self.windows = snapshot.manifest["step"], snapshot.manifest["windows"]
            if snapshot.manifest["config"]["optimizer"]["name"] == config.optimizer.name:
                self.optimizer.load_state_dict(snapshot.part("optimizer."))
        self.cluster.step = self.step
        self.restored = snapshot.manifest if snapshot else None
        trained = compiled(self.model, device) if config.trainer.compile else self.model
        self.ddp = DistributedDataParallel(trained, gradient_as_bucket_view=True) if self.cluster.launch.master else None
        self.forward: Callable[..., Any] = self.ddp or trained
        self.sampler = ElasticSampler(
            self.corpus.train,
            batch_size=config.trainer.batch_size,
            micro_batch_size=config.trainer.micro_batch_size,
            seed=config.seed,
            num_replicas=self.cluster.world_size,
            rank=self.cluster.rank,
        )
        self.sampler.seek(self.windows)
        self.micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
        self.losses = torch.zeros(self.micro_batches, dtype=torch.float64)  # of the last step; those of other workers stay zero

    def run(self) -> None:
        """Train from where the run stands to max_steps; on return everything is durable, on all workers."""
        config = self.config.trainer
        if self.restored:
            resume.compare_software(self.restored["software"], self.software())
        if config.eval_only:
            log.info("step %d  val/loss %.4f  val/bits_per_byte %.4f", self.step, *self.evaluate().values())
            return
        if self.step >= config.max_steps and self.restored:
            log.info("the run already stands at step %d and trainer.max_steps is %d: nothing is left to do", self.step, config.max_steps)
            return
        self.open_records()
        self.announce()
        self.batches = iter(DataLoader(self.corpus.train, batch_size=config.micro_batch_size, sampler=self.sampler, collate_fn=lambda batch: batch))
        self.progress = Progress(self.step, config.max_steps) if self.main else None
        if self.step == 0:
            self.report_evaluation()
        if config.max_steps == 0:
            self.save()
        self.restart_clock()
        while self.step < config.max_steps:
            norm = self.train_step()
            self.after_step(norm)
        if self.main:
            self.close_records()
        self.cluster.barrier()

    def train_step(self) -> Tensor:
        """One optimizer update; returns the norm of the gradient before clipping."""
        mine = self.sampler.micro_batches()
        with out_of_memory_named():
            for micro_batch in mine:
                began = time.perf_counter()
                inputs, targets = (part.to(self.cluster.device, non_blocking=True) for part in next(self.batches))
                self.data_s += time.perf_counter() - began
                last = micro_batch == mine[-1]
                self.accumulate(micro_batch, inputs, targets, share=last)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.grad_clip or math.inf)
            self.rate = learning_rate(self.step + 1, self.config.optimizer, self.config.trainer.max_steps)
            self.optimizer.step(self.rate)
            self.optimizer.zero_grad()
        self.step += 1
        self.windows += self.config.trainer.batch_size
        self.cluster.step = self.step
        return norm

    def accumulate(self, micro_batch: int, inputs: Tensor, targets: Tensor, share: bool) -> None:
        """Add a micro-batch's part of the gradient; with the last one the workers `share` theirs."""
        if self.config.model.dropout:
            torch.manual_seed(mix(self.config.seed, self.step, micro_batch))
        with contextlib.nullcontext() if share or not self.ddp else self.ddp.no_sync():
            with self.autocast():
                _, loss = self.forward(inputs, targets)
            # DDP takes the mean over workers; the gradient is to be the mean over micro-batches.
            (loss * (self.cluster.world_size / self.micro_batches)).backward()
        self.losses[micro_batch] = loss.detach()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.cluster.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss over every token of the validation split, dropout off; batches are dealt in turn to the workers."""
        self.model.eval()
        size, world = self.config.trainer.micro_batch_size, self.cluster.world_size
        scored = len(self.corpus.val.tokens) - 1
        sums = torch.zeros(scored // (size * self.config.data.block_size) + 2, dtype=torch.float64)
        for number, (inputs, targets) in itertools.islice(enumerate(self.corpus.val.in_order(size)), self.cluster.rank, None, world):
            with self.autocast():
                _, loss = self.model(inputs.to(self.cluster.device), targets.to(self.cluster.device))
            sums[number] = loss.double() * targets.numel()
        self.model.train()
        nats = math.fsum(self.cluster.sum(sums).tolist())
        return {"val/loss": nats / scored, "val/bits_per_byte": nats / math.log(2) / self.corpus.val_bytes}

    # Reporting and saving

    def after_step(self, norm: Tensor) -> None:
        config, last = self.config, self.step == self.config.trainer.max_steps
        if self.progress:
            self.progress.advance()
        if last or self.step % config.trainer.log_every == 0:
            self.report_training(norm)
        if last or self.step % config.trainer.eval_every == 0:
            self.pause_clock(self.report_evaluation)
        if last or self.step % config.snapshot.every == 0:
            self.pause_clock(self.save)

    def restart_clock(self) -> None:
        self.clock, self.timed_from, self.data_s = time.perf_counter(), self.step, 0.0

    def pause_clock(self, work: Callable[[], None]) -> None:
        """Do something that is no part of a step's time."""
        began = time.perf_counter()
        work()
        self.clock += time.perf_counter() - began

    def report_training(self, norm: Tensor) -> None:
        """One record of the step just done, with rates over the steps since the record before."""
        losses = self.cluster.sum(self.losses.clone())
        if self.main:
            steps, tokens_per_step = self.step - self.timed_from, self.config.trainer.batch_size * self.config.data.block_size
            step_s = (time.perf_counter() - self.clock) / steps
            peak = peak_flops(torch.cuda.get_device_name()) if self.cluster.device.type == "cuda" else None
            flops = self.model.flops_per_token() * tokens_per_step / step_s
            record = self.metrics.record(
                self.step,
                {
                    "train/loss": math.fsum(losses.tolist()) / self.micro_batches,
                    "lr": self.rate,
                    "grad_norm": float(norm),
                    "tokens": self.windows * self.config.data.block_size,
                    "tokens_per_s": tokens_per_step / step_s,
                    "step_s": step_s,
                    "data_s": self.data_s / steps,
                    "mfu": flops / peak / self.cluster.world_size if peak else None,
                },
            )
            assert self.progress
            self.progress.show(record)
            self.ledger.seen(self.step, step_s)
        self.restart_clock()

    def report_evaluation(self) -> None:
        values = self.evaluate()
        if self.main:
            record = self.metrics.record(self.step, values)
            log.info(
                "step %d/%d  val/loss %.4f  val/bits_per_byte %.4f",
                self.step,
                self.config.trainer.max_steps,
                record["val/loss"],
                record["val/bits_per_byte"],
            )
            if text := self.sample():
                log.info("%s", "\n".join("    " + line for line in text.splitlines()))
            self.picture.draw(self.ledger.restarts())

    def sample(self) -> str:
        """Text that the model writes now, behind a line's end if the vocabulary has one."""
        characters, count = self.corpus.vocabulary.characters, self.config.trainer.sample_tokens
        prompt = [max(characters.find("\n"), 0)]
        return self.corpus.vocabulary.decode(list(generate(self.model, prompt, count, seed=self.config.seed)))

    def save(self) -> None:
        """Copy the state and write it in the background."""
        if not self.main:
            return
        tensors = {f"model.{name}": weight.detach() for name, weight in self.model.named_parameters()}
        tensors |= {f"optimizer.{name}": state for name, state in self.optimizer.state_dict().items()}
        manifest = {
            "step": self.step,
            "windows": self.windows,
            "config": to_dict(self.config),
            "vocabulary": self.corpus.vocabulary.characters,
            "data": {"path": self.config.data.path, "sha256": self.corpus.fingerprint},
            "software": self.software(),
            "metrics": dict(self.metrics.last),
        }
        self.metrics.sync()  # records of a step that has a snapshot are never written again
        self.writer.start(manifest, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})

    def software(self) -> dict[str, Any]:
        """What the bits depend on beside the configuration."""
        device = self.cluster.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
        return {"torch": torch.__version__, "device": name, "threads": self.cluster.threads, "dtype": str(self.dtype).removeprefix("torch.")}

    def open_records(self) -> None:
        if self.main:
            replace_file(self.run_dir / "config.yaml", dump(self.config))
            self.metrics = Metrics(self.run_dir, self.step)
            self.ledger = Ledger(self.run_dir, {"torch": torch.__version__})
            self.picture = Picture(self.run_dir, self.corpus.entropy_floor)
            self.writer = Writer(self.folder, self.config.snapshot.keep_last, self.config.snapshot.keep_best)

    def announce(self) -> None:
        """The plan, before the first step."""
        if not self.main:
            return
        trainer, workers = self.config.trainer, self.cluster.world_size
        died = self.ledger.begin(workers, self.step, self.cluster.before, self.changes)
        if died:
            log.warning("%s", died)
            return
        parameters = sum(weight.numel() for weight in self.model.parameters())
        steps_per_epoch = self.sampler.windows_per_epoch / trainer.batch_size
        log.info(
            "%s with %s parameters, %s, %d worker%s on %s with %d CPU thread%s each",
            self.config.model.arch,
            f"{parameters:,}",
            self.software()["dtype"],
            workers,
            "s" * (workers > 1),
            self.software()["device"],
            self.cluster.threads,
            "s" * (self.cluster.threads > 1),
        )
        log.info(
            "%s of %s characters, %d distinct; %s tokens per step, %.1f steps per epoch, %d steps",
            self.config.data.path,
            f"{len(self.corpus.train.tokens) + len(self.corpus.val.tokens):,}",
            len(self.corpus.vocabulary),
            f"{trainer.batch_size * self.config.data.block_size:,}",
            steps_per_epoch,
            trainer.max_steps,
        )
        shares = [range(rank * self.micro_batches // workers, (rank + 1) * self.micro_batches // workers) for rank in range(workers)]
        log.info(
            "micro-batches of %d windows in a step: %s",
            trainer.micro_batch_size,
            ", ".join(
                f"worker {rank} reads {share.start}-{share.stop - 1}" if share else f"worker {rank} idles" for rank, share in enumerate(shares)
            ),
        )
        log.info(
            "snapshots every %d steps to %s; %s",
            self.config.snapshot.every,
            self.folder.url,
            f"going on from step {self.step}" if self.restored else "a fresh run",
        )
        for change in self.changes:
            log.info("changed on purpose: %s", change)

    def close_records(self) -> None:
        assert self.progress
        self.progress.close()
        self.writer.finish()
        self.ledger.end("finished", self.step)
        self.picture.draw(self.ledger.restarts(), wait=True)
        log.info("finished at step %d; snapshot in %s, metrics and loss.png in %s", self.step, self.folder.url, self.run_dir)


def make_run_dir(config: Config) -> Path:
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir {config.run_dir} cannot be made: {error.strerror}") from None
    return Path(config.run_dir)


def read_corpus(config: Config, cluster: Cluster) -> Corpus:
    """Rank 0 reads, all get the bytes and prepare them alike."""
    content = cluster.all_or_none(lambda: read_bytes(config.data) if cluster.rank == 0 else None)
    return prepare(cluster.share(content, source=0), config.data)


def arithmetic(wanted: str, device: torch.device) -> torch.dtype:
    """The type of the matrix products: bfloat16 where it is asked for or, under auto, native."""
    native = torch.cuda.get_device_capability() >= (8, 0) if device.type == "cuda" else device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if wanted == "bfloat16" or (wanted == "auto" and native) else torch.float32


def compiled(model: GPT, device: torch.device) -> Callable[..., Any]:
    """The compiled model if it compiles, else the model itself and one line why."""
    tokens = torch.zeros((1, model.block_size), dtype=torch.long, device=device)
    try:
        result = torch.compile(model)
        result(tokens, tokens)[1].backward()
    except Exception as error:  # whatever stage of the compiler fails, the run can do without it
        log.warning("torch.compile failed (%s: %s); going on without it", type(error).__name__, (str(error).splitlines() or [""])[0])
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def out_of_memory_named() -> Any:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise OutOfMemory("out of memory: lower trainer.micro_batch_size (the result stays the same up to rounding)") from error
        raise
