"""The training loop: a run is a function of its configuration, whoever computes it.

A step is `batch_size / micro_batch_size` micro-batches, shared among the workers. The data and dropout of a
micro-batch depend on (seed, step, micro-batch) alone, and the gradients are summed in one order. So the whole
state of a run between two steps is the model, the optimizer and one integer, the windows seen so far: what a
snapshot holds.
"""

import contextlib
import logging
import math
from collections.abc import Iterator

import torch

from mingpt import events
from mingpt.audit import START, Audit
from mingpt.batches import Batches
from mingpt.claims import Claims, claim_places
from mingpt.config import Config
from mingpt.corpus import load_corpus, load_data
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import autocast
from mingpt.errors import NonFiniteError, NonRetryableError, UserError
from mingpt.evaluate import Evaluator, is_due, is_missing
from mingpt.failures import not_finite, out_of_memory_explained, raise_if_repeated
from mingpt.initialize import init_environment, init_state, open_initial_weights
from mingpt.optim import learning_rate
from mingpt.report import RunLogger, StepStats, StepTimer, is_reported, open_log
from mingpt.resume import StartPoint, describe_start, find_start
from mingpt.run_folder import check_same_settings, open_run_folder
from mingpt.saving import Saving

log = logging.getLogger(__name__)


class Trainer:
    """One rank's part of a run. Construct it on every rank, then call `run` once. Raises UserError."""

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config, self.context = config, context
        check_same_settings(config, context)
        folder = open_run_folder(config, context)
        claims = claim_places(config, context, folder)
        open_log(context.rank, folder.path if folder.is_kept else None, claims.may_write)
        raise_if_repeated(context, folder)
        data = load_data(config, context)
        start = find_start(config, context, folder, data, claims.was_started())
        start.store.check_claim = claims.check
        initial = open_initial_weights(config, context, start)
        corpus = load_corpus(config, context, data, start, initial)
        self.environment = init_environment(config, context, start)
        with out_of_memory_explained():
            self.state, self.sampler = init_state(config, context, corpus, start, self.environment, initial)
        self.strategy = self.state.strategy
        micro_batches = config.trainer.batch_size // config.trainer.micro_batch_size
        self.audit = Audit(start.snapshot.manifest["audit"] if start.snapshot else START, micro_batches)
        self.losses = torch.zeros(micro_batches, device=context.device)  # zero for those of other ranks
        self.step_losses: list[float] = []  # of all micro-batches of the last step
        self.lr = 0.0
        self.timer = StepTimer(self.state.step)
        self.dtype = getattr(torch, self.environment["dtype"])
        self.evaluator = Evaluator(config, context, self.state, corpus, self.dtype)
        steps = max(0, config.trainer.max_steps - self.state.step)
        self.batches = Batches(config, context, corpus, self.sampler, self.audit, self.timer, steps)
        self.saving = Saving(config, context, self.state, start, corpus, self.environment, self.audit)
        # A restarted job at max_steps died after its last snapshot and has yet to report that it finished.
        is_complete = self.saving.is_resumed and self.state.step >= config.trainer.max_steps
        is_over = is_complete and context.rank == 0 and is_reported(folder.path, start.unwritten)
        is_over = context.broadcast_object(is_over, 0)
        self.evaluation_missing = is_missing(config, context, start)
        self.nothing_left = is_over and not start.is_restart and not self.evaluation_missing
        if not config.trainer.eval_only:
            context.stop_signal.defer()
        self.run_logger = self.open_run_logger(start, corpus, claims)
        if context.rank == 0:  # from here on run.json tells from which step the job began
            context.mark_started()
        claims.mark_started()
        context.exit.note_begun()

    def open_run_logger(self, start: StartPoint, corpus: Corpus, claims: Claims) -> RunLogger | None:
        """On the ranks that keep a run folder, unless there is nothing to report. Collective."""
        context = self.context
        generation = describe_start(start, context)
        if not start.folder.is_kept or self.nothing_left:
            return None
        logger = RunLogger(
            self.config,
            corpus,
            generation,
            self.environment,
            claims.check_run_dir,
            claims.may_write,
            is_main=context.rank == 0,
        )
        context.exit.note_failure = lambda why: logger.failed(self.state.step, why)
        return logger

    def run(self) -> str | None:
        """Train up to max_steps, or until told to stop; then everything is durable, on all ranks.

        Returns the request that stopped the run, if one did. Raises NonFiniteError, or NonRetryableError for
        a failure that repeats, on all ranks; ExpectedError where memory does not suffice.
        """
        with self.failure_recorded():
            if not self.begin_run():
                return None
            stop = self.context.reduce_step_status(self.losses, 0)().stop_reason  # since the workers started
            if self.evaluation_missing and not stop:
                stop = self.evaluate()
                if self.state.step and not stop:
                    self.saving.save_to_disk(self.run_logger)  # whose manifest holds the evaluation
            self.timer.reset(self.state.step)
            while self.state.step < self.config.trainer.max_steps and not stop:
                grad_norm, stop = self.step()
                stop = self.after_step(grad_norm, stop)
            is_complete = self.state.step >= self.config.trainer.max_steps and not self.evaluation_missing
            stopped_by = None if is_complete else stop
            self.end_run(stopped_by)
            return stopped_by

    def step(self) -> tuple[float, str | None]:
        """One optimizer update. Returns the gradient's norm and the request to stop, if there is one."""
        config, state, strategy = self.config, self.state, self.strategy
        step = state.step
        events.emit("step_start", step=step)
        strategy.start_step()
        with out_of_memory_explained():
            for micro_batch in strategy.my_micro_batches:
                inputs, targets = self.batches.next(step, micro_batch)
                with strategy.micro_batch(micro_batch):
                    with autocast(self.context.device, self.dtype):
                        loss = strategy.forward(inputs, targets)
                    events.emit("forward_end", step=step, micro_batch=micro_batch)
                    (loss * strategy.loss_scale).backward()
                    events.emit("backward_end", step=step, micro_batch=micro_batch)
                self.losses[micro_batch] = math.nan if self.batches.error else loss.detach()
            strategy.finish_step()
            events.emit("reduction_end", step=step)
            status = self.context.reduce_step_status(self.losses, self.saving.newest_written)
            grad_norm_tensor = strategy.clip_grad_norm_(config.optimizer.grad_clip)
            self.lr = learning_rate(step + 1, config.optimizer, config.trainer.max_steps)
            state.optimizer.step(self.lr, strategy.gradients())
            strategy.finish_update()
            events.emit("optimizer_end", step=step)
            # A GPU is waited for only here, after it has been given all the work of the step.
            self.step_losses, newest_written, stop = status()
            grad_norm = float(grad_norm_tensor)
        self.saving.note_written(newest_written, self.run_logger)
        self.raise_if_not_finite(grad_norm)
        self.audit.end_step(self.context)
        state.advance(config.trainer.batch_size)
        self.context.exit.step = state.step
        events.emit("step_end", step=state.step)
        return grad_norm, stop

    def after_step(self, grad_norm: float, stop: str | None) -> str | None:
        """Whatever is due. Records come before a snapshot, so that it holds all of its step.

        Returns the request to stop, if there is one: an evaluation is left to the next generation then.
        """
        config, step = self.config, self.state.step
        is_last = step == config.trainer.max_steps
        if self.run_logger:
            self.run_logger.on_step(step)
        if is_last or step % config.trainer.log_every == 0:
            self.log_training(grad_norm)
        self.evaluation_missing = is_due(config.trainer, step)
        if self.evaluation_missing and not stop:
            stop = self.timer.exclude(self.evaluate)
        if is_last or stop or step % config.snapshot.every == 0:
            is_end = is_last or bool(stop)
            self.timer.exclude(lambda: self.saving.save_to_disk(self.run_logger, is_end))
        elif config.snapshot.memory_every and step % config.snapshot.memory_every == 0:
            self.timer.exclude(lambda: self.saving.save_to_memory(self.run_logger))
        return stop

    def begin_run(self) -> bool:
        """Whether there is anything to train; if so, everything is ready for the first step."""
        config, state = self.config.trainer, self.state
        if config.eval_only:
            losses = self.evaluator.evaluate(state.step)
            assert losses is not None, "a request to stop ends an evaluation alone at once"
            named = [f"{name} {value:.4f}" for name, value in losses.items()]
            log.info("step %d  %s", state.step, "  ".join(named))
            return False
        if self.nothing_left:
            self.context.stop_signal.remove_stop_file()
            if self.saving.durable_step >= state.step:
                self.saving.remove_memory_snapshots()
            log.info(
                "the run already stands at step %d and trainer.max_steps is %d: nothing is left to do",
                state.step,
                config.max_steps,
            )
            return False
        failure = self.run_logger.repeated_failure() if self.run_logger else None
        failure = self.context.broadcast_object(failure, 0)
        if failure:
            self.saving.remove_memory_snapshots()
            raise NonRetryableError(failure)
        if self.run_logger:
            parameters = sum(map(math.prod, self.strategy.shapes.values()))
            assignment = self.sampler.micro_batches_by_rank()
            self.run_logger.plan(
                state.step, parameters, self.sampler.windows_per_epoch, assignment, self.saving.store.url
            )
        self.saving.allocate()
        events.emit("run_start", state=state, strategy=self.strategy)
        return True

    def end_run(self, stopped_by: str | None) -> None:
        """Return when the last snapshot is on disk, on all ranks."""
        if self.saving.is_missing():
            self.saving.save_to_disk(self.run_logger, is_last=True)
        self.saving.finish(self.run_logger)
        events.emit("run_end", state=self.state)

        def report() -> None:
            if self.run_logger:
                self.context.stop_signal.remove_stop_file()
                self.run_logger.ended(self.state.step, stopped_by, self.saving.store.url)

        self.context.run_with_heartbeat(report)
        self.saving.remove_memory_snapshots()

    def raise_if_not_finite(self, grad_norm: float) -> None:
        """Gradient and losses are the same on all ranks, so all of them raise, or none.

        NonFiniteError, or UserError for data that a rank could not use.
        """
        bad = [number for number, loss in enumerate(self.step_losses) if not math.isfinite(loss)]
        if math.isfinite(grad_norm) and not bad:
            return
        micro_batch_size, windows_seen = self.config.trainer.micro_batch_size, self.state.windows_seen
        where = []
        for number in bad:
            starts = self.sampler.window_starts(windows_seen + number * micro_batch_size, micro_batch_size)
            where.append(f"micro-batch {number} (windows at {', '.join(map(str, starts))})")
        last_window = windows_seen + self.config.trainer.batch_size - 1
        sentence = not_finite(self.state.step + 1, where, windows_seen, last_window)
        data_error = self.batches.find_error()
        if data_error:
            raise UserError(data_error)
        self.saving.saver.wait()  # all ranks write what is sharded
        if self.run_logger:
            self.run_logger.failed(self.state.step, sentence)
        self.saving.remove_memory_snapshots()
        raise NonFiniteError(sentence)

    def log_training(self, grad_norm: float) -> None:
        """One record of the last step, with rates over the steps since the record before."""
        step_s, data_s = self.timer.seconds_per_step(self.state.step)
        if self.run_logger:
            stats = StepStats(
                step=self.state.step,
                loss=math.fsum(self.step_losses) / len(self.step_losses),
                lr=self.lr,
                grad_norm=grad_norm,
                windows_seen=self.state.windows_seen,
                block_size=self.config.data.block_size,
                batch_size=self.config.trainer.batch_size,
                step_s=step_s,
                data_s=data_s,
                flops_per_token=self.state.model.flops_per_token(),
                world_size=self.context.world_size,
                device_name=self.environment["device"],
            )
            self.run_logger.log_training(stats)
        self.timer.reset(self.state.step)

    def evaluate(self) -> str | None:
        """Evaluate and put it on record. Returns the request to stop that has cut it, if one has."""
        losses, context = self.evaluator.evaluate(self.state.step), self.context
        if losses is None:
            return context.agreed_stop
        sample = context.run_with_heartbeat(lambda: self.evaluator.sample(self.run_logger is not None))
        if context.should_stop():
            return context.agreed_stop
        if self.run_logger:
            self.run_logger.log_evaluation(self.state.step, losses, sample)
        self.evaluation_missing = False
        return None

    @contextlib.contextmanager
    def failure_recorded(self) -> Iterator[None]:
        """Note in run.json a failure after which no generation follows."""
        try:
            yield
        except UserError as error:
            self.saving.saver.wait()
            self.context.exit.note_end_of_job(str(error))
            self.saving.remove_memory_snapshots()
            raise
        except Exception as error:
            is_noted = isinstance(error, NonRetryableError) or self.context.launch.has_restarts_left()
            if not is_noted:
                self.context.exit.note_end_of_job(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
