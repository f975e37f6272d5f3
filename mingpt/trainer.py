"""The loop: a run is a function of its configuration, whoever computes it.

A step is `batch_size / micro_batch_size` micro-batches, shared among the workers. What a micro-batch is made of, its windows
and its dropout, depends on (seed, step, micro-batch) alone, and the gradients are summed in one order. So the whole state of a run
between two steps is the model, the optimizer and one integer, the windows dealt so far. That is what a snapshot holds.
"""

import contextlib
import functools
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mingpt import audit, resume
from mingpt.cluster import Cluster, is_lost_peer
from mingpt.compiler import compiled, import_compiler
from mingpt.config import Config, UserError, check_workers, to_dict
from mingpt.data import Corpus, prepare, read_bytes
from mingpt.generate import generate
from mingpt.launch import EndOfJob, Told
from mingpt.ledger import run_id
from mingpt.memory import Memory
from mingpt.metrics import open_log, peak_flops
from mingpt.model import GPT, Loss
from mingpt.optim import Optimizer, learning_rate
from mingpt.reduce import GradientTree
from mingpt.report import Report
from mingpt.sampler import ElasticSampler, mix
from mingpt.snapshot import Abandoned, Snapshot, Writer

log = logging.getLogger(__name__)

EVAL_TOKENS = 4096  # in one batch at least: without a backward pass there is room, and small batches cost more than they hold


class Poison(EndOfJob):
    """A loss or gradient that is not a finite number; the update is in no snapshot."""


class Trainer:
    """One worker's part of a run. Construct it on every worker, then call `run` once."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster
        main = cluster.rank == 0
        self.run_dir = cluster.all_or_none(lambda: make_run_dir(config))
        open_log(self.run_dir if main else None)
        self.corpus = read_corpus(config, cluster)
        self.folder = cluster.all_or_none(lambda: resume.open_folder(config, cluster))
        restart = cluster.admitted()
        if not restart:
            check_workers(config, cluster.world_size)
        run = next(filter(None, cluster.gather(run_id(self.run_dir))), None) or cluster.broadcast(uuid.uuid4().hex, 0)
        self.memory = Memory(config.snapshot.memory_path, run, self.run_dir, cluster.launch.node)
        found = resume.look(self.folder, self.memory, cluster, restart)
        snapshot, self.durable, self.saved = found.newest, found.durable, found.durable
        changes = resume.check(snapshot, config, found.where, self.corpus.fingerprint, restart)
        if not config.trainer.eval_only:
            resume.take_over(self.folder, self.memory, cluster, found, restart)
        if snapshot:
            cluster.use_threads(snapshot.manifest["software"]["threads"])
        self.dtype = cluster.arithmetic(config.trainer.dtype)
        self.software = cluster.software() | {"dtype": str(self.dtype).removeprefix("torch.")}
        with out_of_memory_named():
            self.build(snapshot)
        if main:
            cluster.admit()
        self.report, self.writer = None, Writer(self.folder, config.snapshot.keep_last, config.snapshot.keep_best)
        # A job that died behind its last snapshot has still to say that it is finished.
        self.nothing_left = bool(snapshot) and self.steps >= config.trainer.max_steps and not restart
        if main and not config.trainer.eval_only and not self.nothing_left:
            self.report = Report(config, cluster, self.corpus, run, self.steps, changes, self.software, restart)

    def build(self, snapshot: Snapshot | None) -> None:
        """Model, optimizer and sampler, as the snapshot left them or as the seed makes them."""
        config, cluster = self.config, self.cluster
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, vocab_size=len(self.corpus.vocabulary), block_size=config.data.block_size)
        self.steps, self.windows, chain = 0, 0, audit.START
        if snapshot:
            self.steps, self.windows, chain = (snapshot.manifest[key] for key in ("step", "windows", "audit"))
            resume.load_weights(self.model, snapshot.part("model."), f"the snapshot of step {self.steps}")
        elif config.snapshot.init_from:
            cluster.in_turns(lambda: resume.init_from(self.model, str(config.snapshot.init_from), self.corpus.vocabulary))
        self.model.to(cluster.device)
        cluster.level(self.model.parameters())
        self.optimizer = Optimizer(self.model, config.optimizer, cluster.rank, cluster.world_size, cluster.everybodys)
        if snapshot and snapshot.manifest["config"]["optimizer"]["name"] == config.optimizer.name:
            self.optimizer.load_state_dict(snapshot.part("optimizer."))
        cluster.step, self.restored = self.steps, snapshot is not None
        self.micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
        self.sampler = ElasticSampler(
            self.corpus.train, batch_size=config.trainer.batch_size, micro_batch_size=config.trainer.micro_batch_size,
            seed=config.seed, num_replicas=cluster.world_size, rank=cluster.rank,
        )  # fmt: skip
        self.shares = self.sampler.shares()
        self.sampler.seek(self.windows)
        self.mine = self.shares[cluster.rank]
        self.audit = audit.Audit(chain, self.micro_batches)
        self.digests: dict[int, bytes] = {}  # of this worker's micro-batches in the step under way
        self.losses = torch.zeros(self.micro_batches, device=cluster.device)  # of one step; those of other workers stay zero
        self.distribute()
        if snapshot:
            resume.compare_software(snapshot.manifest["software"], self.software)

    def distribute(self) -> None:
        """How gradients become the workers' common mean."""
        if self.config.trainer.reduction == "exact":
            self.cluster.insist_on_determinism()
        to_train = self.steps < self.config.trainer.max_steps and not self.config.trainer.eval_only
        made, replayed = self.compile() if self.config.trainer.compile and to_train else (None, False)
        self.software["compiled"] = made is not None
        trained: Any = Loss(self.model) if made is None else made
        self.tree, self.ddp = None, None
        if self.config.trainer.reduction == "exact":
            self.tree = GradientTree(list(self.model.parameters()), self.shares, self.cluster.rank, borrowed=replayed)
        elif self.cluster.launch.master:
            # The buffers are constants: they need no broadcast.
            self.ddp = DistributedDataParallel(trained, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.forward: Callable[[Tensor, Tensor], Tensor] = trained if self.ddp is None else self.ddp
        # The tree adds; DDP takes the mean over the workers.
        self.scale = (self.cluster.world_size if self.ddp else 1) / self.micro_batches

    def compile(self) -> tuple[Callable[[Tensor, Tensor], Tensor] | None, bool]:
        """The compiled loss, or None, and whether its gradients are only borrowed; see compiler.compiled."""
        config, cluster = self.config, self.cluster
        example = torch.zeros(config.trainer.micro_batch_size, config.data.block_size, dtype=torch.long, device=cluster.device)
        work = functools.partial(compiled, Loss(self.model), example, self.autocast, graphs=config.trainer.reduction == "exact")
        # The first worker of a node fills the compiler's cache for the others; kernels for another GPU are not in it.
        first = cluster.launch.local_rank == 0 or cluster.device.type == "cuda"
        early = cluster.with_signs_of_life(lambda: work() if first else import_compiler())
        mine = cluster.with_signs_of_life(lambda: early or work())
        return mine if all(cluster.gather(mine[0] is not None)) else (None, False)  # all workers compute with the same kernels

    def run(self) -> str | None:
        """Train from where the run stands to max_steps, or until told to stop; then everything is durable, on all workers.

        Returns what asked the run to stop, if something did.
        """
        config = self.config.trainer
        self.cluster.listen(self.run_dir / "STOP")
        if config.eval_only:
            log.info("step %d  val/loss %.4f  val/bits_per_byte %.4f", self.steps, *self.evaluate().values())
            return None
        if self.nothing_left:
            self.remove_stop_file()
            if self.durable >= self.steps:
                self.forget()
            log.info("the run already stands at step %d and trainer.max_steps is %d: nothing is left to do", self.steps, config.max_steps)
            return None
        if hopeless := self.cluster.broadcast(self.report.hopeless() if self.report else None, 0):
            self.forget()
            raise EndOfJob(hopeless)
        if self.report:
            parameters = sum(weight.numel() for weight in self.model.parameters())
            self.report.plan(self.steps, parameters, self.sampler.windows_per_epoch, self.shares, self.folder.url)
            self.writer.reserve(self.state())
        if self.config.snapshot.memory_every and self.cluster.launch.local_rank == 0:
            self.memory.reserve(self.state())
        self.batches = self.corpus.train.batches(self.sampler, config.micro_batch_size, self.cluster.device)
        self.restart_clock()
        _, _, stop = self.cluster.exchange(self.losses, 0)()  # asked for while the workers were starting
        if self.steps == 0 and config.eval_at_start and not stop:
            self.report_evaluation()
        self.restart_clock()
        while self.steps < config.max_steps and not stop:
            norm, stop = self.step()
            self.after_step(norm, stop)
        if self.steps > self.saved or (self.steps == 0 and not self.restored):
            self.save()
        self.finish(stop if self.steps < config.max_steps else None)
        return stop if self.steps < config.max_steps else None

    def failed(self, error: Exception) -> None:
        """Book a failure after which no generation follows. Called by whoever runs this trainer, on the worker that it hit."""
        if self.report and not isinstance(error, EndOfJob) and not self.cluster.launch.another_chance():
            self.report.failed(self.steps, f"{type(error).__name__}: {error}".splitlines()[0])

    def step(self) -> tuple[float, str | None]:
        """One optimizer update. Returns the norm of the gradient before clipping, and what asked the run to stop, if anything did."""
        if self.tree:
            self.tree.begin()
        with out_of_memory_named():
            for micro_batch in self.mine:
                began = time.perf_counter()
                inputs, targets, *on_device = next(self.batches)
                self.digests[micro_batch] = audit.digest(inputs, targets)
                self.data_s += time.perf_counter() - began
                self.accumulate(micro_batch, *on_device)
            if not self.mine and self.ddp:
                self.attend()
            if self.tree:
                self.tree.finish()  # its collectives come from a thread: these must be over before the next
            exchanged = self.cluster.exchange(self.losses, self.writer.newest)
            norm_there = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.grad_clip or math.inf)
            self.rate = learning_rate(self.steps + 1, self.config.optimizer, self.config.trainer.max_steps)
            self.optimizer.step(self.rate)
            self.optimizer.zero_grad()
            # A GPU has work until here; only now is it waited for. Poisoned weights go no further than this process.
            self.step_losses, written, stop = exchanged()
            norm = float(norm_there)
            self.durable = max(self.durable, written)
            self.refuse_poison(norm)
        self.audit.steps.append(self.digests)
        self.digests = {}
        self.steps += 1
        self.windows += self.config.trainer.batch_size
        self.cluster.step = self.steps
        return norm, stop

    def accumulate(self, micro_batch: int, inputs: Tensor, targets: Tensor) -> None:
        """Add a micro-batch's part of the gradient; with a worker's last one, all workers share theirs."""
        if self.config.model.dropout:
            torch.manual_seed(mix(self.config.seed, self.steps, micro_batch))
        if self.tree:
            self.tree.before(micro_batch)
        with self.ddp.no_sync() if self.ddp and micro_batch != self.mine[-1] else contextlib.nullcontext():
            with self.autocast():
                loss = self.forward(inputs, targets)
            (loss * self.scale).backward()
        self.losses[micro_batch] = loss.detach()
        if self.tree:
            self.tree.after(micro_batch)

    def attend(self) -> None:
        """A worker too many takes part in DDP's reduction with nothing of its own."""
        shape = self.config.trainer.micro_batch_size, self.config.data.block_size
        tokens, targets = torch.zeros(2, *shape, dtype=torch.long, device=self.cluster.device)
        self.forward(tokens, targets).mul(0.0).backward()

    def refuse_poison(self, norm: float) -> None:
        """Gradient and losses are the same on all workers, so all of them raise Poison, or none."""
        bad = [number for number, loss in enumerate(self.step_losses) if not math.isfinite(loss)]
        if math.isfinite(norm) and not bad:
            return
        size = self.config.trainer.micro_batch_size
        where = [f"micro-batch {number} (windows at {', '.join(map(str, self.sampler.deal(self.windows + number * size, size)))})" for number in bad]
        what = f"loss of {'; '.join(where)}" if bad else f"gradient of windows {self.windows} to {self.windows + self.config.trainer.batch_size - 1}"
        sentence = f"step {self.steps + 1}: the {what} is not finite; its update is dropped and the last snapshot stands"
        if self.report:
            self.writer.idle(timeout_s=math.inf)
            self.report.failed(self.steps, sentence)
        self.forget()
        raise Poison(sentence)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.cluster.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def evaluate(self) -> dict[str, float]:
        """Mean loss over every token of the validation split, dropout off; batches are dealt in turn to the workers."""
        scored = len(self.corpus.val.tokens) - 1
        nats = math.fsum(self.cluster.sum(self.cluster.in_turns(self.scores)).tolist())
        return {"val/loss": nats / scored, "val/bits_per_byte": nats / math.log(2) / self.corpus.val_bytes}

    @torch.no_grad()
    def scores(self) -> Tensor:
        """(batches,) nats of each; zero for those of other workers."""
        self.model.eval()
        size, world = max(self.config.trainer.micro_batch_size, EVAL_TOKENS // self.config.data.block_size), self.cluster.world_size
        sums = torch.zeros(len(self.corpus.val.tokens) // (size * self.config.data.block_size) + 2, dtype=torch.float64)
        for number, (inputs, targets) in itertools.islice(enumerate(self.corpus.val.in_order(size)), self.cluster.rank, None, world):
            with self.autocast():
                _, loss = self.model(inputs.to(self.cluster.device), targets.to(self.cluster.device))
            sums[number] = float(loss) * targets.numel()
        self.model.train()
        return sums

    def after_step(self, norm: float, stop: str | None) -> None:
        """Records, evaluation and snapshot as they fall due; records come first, so that a snapshot's step has all of its own."""
        config, last = self.config, self.steps == self.config.trainer.max_steps
        if self.report:
            self.report.progress.advance()
        if last or self.steps % config.trainer.log_every == 0:
            self.report_training(norm)
        if last or self.steps % config.trainer.eval_every == 0:
            self.pause_clock(self.report_evaluation)
        if last or stop or self.steps % config.snapshot.every == 0:
            self.pause_clock(self.save)
        elif config.snapshot.memory_every and self.steps % config.snapshot.memory_every == 0:
            self.pause_clock(self.save_in_memory)

    def restart_clock(self) -> None:
        self.clock, self.timed_from, self.data_s = time.perf_counter(), self.steps, 0.0

    def pause_clock(self, work: Callable[[], None]) -> None:
        """Do something that is no part of a step's time."""
        began = time.perf_counter()
        work()
        self.clock += time.perf_counter() - began

    def report_training(self, norm: float) -> None:
        """One record of the step just done, with rates over the steps since the record before."""
        steps, tokens_per_step = self.steps - self.timed_from, self.config.trainer.batch_size * self.config.data.block_size
        step_s = (time.perf_counter() - self.clock) / steps
        peak = peak_flops(self.software["device"])
        share = self.model.flops_per_token() * tokens_per_step / step_s / self.cluster.world_size
        if self.report:
            self.report.training(self.steps, {
                "train/loss": math.fsum(self.step_losses) / self.micro_batches, "lr": self.rate, "grad_norm": norm,
                "tokens": self.windows * self.config.data.block_size, "tokens_per_s": tokens_per_step / step_s, "step_s": step_s,
                "data_s": self.data_s / steps, "mfu": share / peak if peak else None,
            })  # fmt: skip
        self.restart_clock()

    def report_evaluation(self) -> None:
        values = self.evaluate()
        text = self.cluster.in_turns(lambda: self.sample() if self.report else "")
        if self.report:
            self.report.evaluation(self.steps, values, text)

    def sample(self) -> str:
        vocabulary = self.corpus.vocabulary
        prompt = [max(vocabulary.characters.find("\n"), 0)]
        return vocabulary.decode(list(generate(self.model, prompt, self.config.trainer.sample_tokens, seed=self.config.seed)))

    def save(self) -> None:
        """Copy the state and write it in the background."""
        if self.durable < self.saved:  # with the last losses rank 0 has told what it has written
            self.wait_for_writer()
        self.saved = self.steps
        chain = self.audit.gather(self.cluster)
        if report := self.report:
            manifest = self.manifest() | {"metrics": dict(report.metrics.last)}

            def rest() -> dict[str, Any]:
                report.metrics.sync()  # records of a step that has a snapshot are never written again: they must be durable first
                return self.linked(chain)

            self.writer.start(manifest, self.state(), rest)

    def save_in_memory(self) -> None:
        """Copy the state to where it outlives this process."""
        chain = self.audit.gather(self.cluster)
        if self.cluster.launch.local_rank == 0:
            self.memory.take(self.manifest() | {"metrics": {}, "after": self.durable}, self.state(), lambda: self.linked(chain))

    def linked(self, chain: Callable[[], str]) -> dict[str, str]:
        try:
            return {"audit": chain()}
        except RuntimeError as error:
            if is_lost_peer(error):
                raise Abandoned from error
            raise

    def state(self) -> dict[str, Tensor]:
        weights = {f"model.{name}": weight.detach() for name, weight in self.model.named_parameters()}
        return weights | {f"optimizer.{name}": state for name, state in self.optimizer.state_dict().items()}

    def manifest(self) -> dict[str, Any]:
        return {
            "step": self.steps, "windows": self.windows, "config": to_dict(self.config), "vocabulary": self.corpus.vocabulary.characters,
            "data": {"path": self.config.data.path, "sha256": self.corpus.fingerprint}, "software": self.software,
        }  # fmt: skip

    def wait_for_writer(self) -> None:
        """Until the last snapshot is written or has failed; in short turns, so that a long upload is no silence to the other workers."""
        while not self.cluster.broadcast(self.writer.idle(timeout_s=1.0), 0):
            pass

    def remove_stop_file(self) -> None:
        """It has done its work; the same command is to go on."""
        try:
            (self.run_dir / "STOP").unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s) and will stop the next run", self.run_dir / "STOP", error.strerror)

    def finish(self, stopped_by: str | None) -> None:
        """Nobody leaves before the last snapshot is durable."""
        self.wait_for_writer()
        if self.report:
            self.writer.finish()
            self.remove_stop_file()
        self.cluster.in_turns(lambda: self.report.ended(self.steps, stopped_by, self.folder.url) if self.report else None)
        self.forget()

    def forget(self) -> None:
        """The run ends here: what it holds in memory is of no more use."""
        if self.cluster.launch.local_rank == 0:
            self.memory.remove()


def make_run_dir(config: Config) -> Path:
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(config.run_dir) / "log.txt").open("a").close()
    except OSError as error:
        raise UserError(f"run_dir {config.run_dir} cannot be written to: {error.strerror}") from None
    return Path(config.run_dir)


def read_corpus(config: Config, cluster: Cluster) -> Corpus:
    """Rank 0 reads, all get the bytes and prepare them alike."""
    content = cluster.in_turns(lambda: read_bytes(config.data) if cluster.rank == 0 else None)
    return prepare(cluster.share(content, source=0), config.data)


@contextlib.contextmanager
def out_of_memory_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise Told("out of memory: lower trainer.micro_batch_size, the batch stays the same; or train a smaller model") from error
        raise
