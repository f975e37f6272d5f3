"""The training loop. With trainer.reduction=exact, a run's bits do not depend on the number of its workers.

For this, the hardware must be of one kind, with one version of torch and one number of threads per worker. A
step has `batch_size / micro_batch_size` micro-batches, which the workers share. The seed and the number of
windows (training sequences) read before determine a micro-batch's windows. The seed, the step and the
micro-batch's number determine its dropout. With exact, gradients are then summed in one fixed order. A
snapshot holds a `TrainState`, the state between two steps.
"""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from mingpt.base import events
from mingpt.base.errors import NonFiniteError, NonRetryableError, UserError
from mingpt.data import mix
from mingpt.distributed.device import autocast
from mingpt.optim import learning_rate
from mingpt.report import RunLogger, StepStats, StepTimer
from mingpt.training.evaluate import Evaluator
from mingpt.training.replay import Replay
from mingpt.training.run import Run, out_of_memory_explained
from mingpt.training.saving import Saving
from mingpt.training.start import is_due

MAX_SKIPPED = 10  # this many skipped updates in a row end the run
log = logging.getLogger(__name__)


class Trainer:
    """The training up to the next restart, on one rank. Construct it on all ranks, then call `run` once."""

    def __init__(self, run: Run) -> None:
        self.config, self.context, self.state, self.sampler = run.config, run.context, run.state, run.sampler
        self.strategy, self.nothing_left = run.strategy, run.start.nothing_left
        self.environment, self.compile_choice = run.environment, run.compile_choice
        micro_batches = run.config.trainer.batch_size // run.config.trainer.micro_batch_size
        # The losses of other ranks' micro-batches stay zero here.
        self.losses = torch.zeros(micro_batches, device=run.context.device)
        self.step_losses: list[float] = []  # losses of all micro-batches of the last step
        self.lr = 0.0
        self.timer = StepTimer(run.start.step)
        self.evaluation_missing = run.start.evaluation_missing
        self.has_new_best = False
        self.evaluator = Evaluator(run)
        self.batches = Batches(run, self.timer)
        if not run.config.trainer.eval_only:
            run.context.stop_signal.defer()
        self.run_logger = self.open_run_logger(run)
        self.saving = Saving(run, self.run_logger)
        self.replay = Replay(run, self.saving, self.run_logger)
        # From here on run.json records from which step the job began, and where this generation fails.
        if run.context.rank == 0:
            run.context.mark_started()

    def open_run_logger(self, run: Run) -> RunLogger | None:
        """Return a new RunLogger; None on a rank that writes no records.

        With `nothing_left` or trainer.eval_only, only returns None. Otherwise also tells `context.exit` how
        to get the last step and, if there is a RunLogger, how to record a failure in run.json. If
        trainer.pause_after is set and rank 0 has a RunLogger, rank 0 sets the time at which the job stops.
        Raises the errors of RunLogger.
        """
        if self.nothing_left or run.config.trainer.eval_only:
            return None
        logger = RunLogger(run.start, run.environment) if run.start.is_kept else None
        note = (lambda why: logger.failed(run.state.step, why)) if logger else None
        run.context.exit.start_run(run.start.run_dir, lambda: run.state.step, note)
        pause_after = run.config.trainer.pause_after
        if logger and pause_after and run.start.is_main:
            # The time of day and run.json are known to all generations, on whatever node.
            left_s = logger.history.content["job_began"] + pause_after - time.time()
            run.context.stop_signal.pause_at = time.monotonic() + left_s
        return logger

    def run(self) -> str | None:
        """Train up to max_steps, or until a request to stop; then wait until the last snapshot is on disk.

        With trainer.eval_only, only evaluates. Returns the request that stopped the run, such as "SIGTERM";
        None if the run is complete, or if trainer.eval_only is set. Collective.

        All ranks raise UserError if a token is outside of the vocabulary, and NonRetryableError if the same
        failure repeats. A rank raises ExpectedError if a step needs more memory than its CPU or CUDA GPU has,
        or if its token shards cannot be read, ClaimLost if the claim (the right to write to the run folder)
        is lost, and an error for which `is_lost_peer` is true if it loses a peer. For further errors see
        `handle_nonfinite`, `Replay.check`, `Evaluator.evaluate` and `Saving.finish`.
        """
        with self.failure_handled():
            if not self.begin_run():
                return None
            context, max_steps = self.context, self.config.trainer.max_steps
            context.reduce_step_status(self.losses)()  # a stop may have been asked for during the start
            if self.evaluation_missing and not context.agreed_stop:
                self.timer.exclude(self.evaluate, "evaluation_s")
                if self.state.step and not context.agreed_stop:
                    self.save(is_wanted=True)  # the manifest holds the evaluation
            self.timer.reset(self.state.step)
            while self.state.step < max_steps and not context.agreed_stop:
                self.after_step(self.step())
            is_complete = self.state.step >= max_steps and not self.evaluation_missing
            stopped_by = None if is_complete else context.agreed_stop
            self.end_run(stopped_by)
            return stopped_by

    def step(self) -> float:
        """Make one step; return the gradient's norm before clipping. Collective."""
        config, state, strategy = self.config, self.state, self.strategy
        step = state.step
        events.emit("step_start", step=step)
        strategy.start_step(state.loss_scale.scale if state.loss_scale else 1.0)
        with out_of_memory_explained():
            self.replay.check()
            for micro_batch in strategy.my_micro_batches:
                inputs, targets = self.batches.next(step, micro_batch)
                with strategy.micro_batch(micro_batch):
                    with autocast(self.context.device, self.context.dtype):
                        loss = strategy.forward(inputs, targets)
                    events.emit("forward_end", step=step, micro_batch=micro_batch)
                    (loss * strategy.loss_factor).backward()
                    events.emit("backward_end", step=step, micro_batch=micro_batch)
                self.losses[micro_batch] = math.nan if self.batches.error else loss.detach()
            strategy.finish_step()
            events.emit("reduction_end", step=step)
            status = self.context.reduce_step_status(self.losses, self.saving.counts)
            grad_norm_tensor = strategy.clip_grad_norm_(config.optimizer.grad_clip)
            self.lr = learning_rate(step + 1, config.optimizer, config.trainer.max_steps)
            may_skip = config.trainer.on_nonfinite == "skip" or state.loss_scale is not None
            if may_skip:
                grad_norm_tensor = grad_norm_tensor.cpu()  # waits for a GPU
            if not may_skip or math.isfinite(float(grad_norm_tensor)):
                state.optimizer.step(self.lr, strategy.gradients())
            strategy.finish_update()
            events.emit("optimizer_end", step=step)
            # Only here does the loop wait for the GPU, after all work of the step is queued on it.
            self.step_losses, counts = status()
            grad_norm = float(grad_norm_tensor)
        self.saving.note_counts(*counts)
        self.handle_nonfinite(grad_norm)
        state.step += 1
        state.windows_seen += config.trainer.batch_size
        events.emit("step_end", step=state.step)
        return grad_norm

    def after_step(self, grad_norm: float) -> None:
        """Record, evaluate and save what is due after a step, in this order. Collective.

        After a request to stop, no evaluation is made: an evaluation that is due is left to the next
        generation.
        """
        config, step = self.config, self.state.step
        is_last = step == config.trainer.max_steps
        if is_last or step % config.trainer.log_every == 0:
            self.log_training(grad_norm)
        self.evaluation_missing, self.has_new_best = is_due(config.trainer, step), False
        if self.evaluation_missing and not self.context.agreed_stop:
            self.timer.exclude(self.evaluate, "evaluation_s")
        is_end = is_last or self.context.agreed_stop is not None
        self.save(is_end, self.has_new_best)

    def save(self, is_end: bool = False, is_wanted: bool = False) -> None:
        self.timer.exclude(lambda: self.saving.save(is_end, is_wanted), "snapshot_wait_s")

    def begin_run(self) -> bool:
        """Prepare for the first step and return True; return False if nothing is left to do. Collective.

        If nothing is left, removes the file STOP, and this run's snapshots in memory unless one of them may
        be newer than those on disk. With trainer.eval_only, only evaluates here and returns False. All ranks
        raise NonRetryableError if earlier generations of the job have failed repeatedly at the same step.
        """
        config, state = self.config.trainer, self.state
        if config.eval_only:
            losses = self.evaluator.evaluate(state.step)
            assert losses is not None, "a request to stop exits at once during trainer.eval_only"
            named = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            log.info(f"step {state.step}  {named}")
            return False
        if self.nothing_left:
            self.context.stop_signal.remove_stop_file()
            if self.saving.durable_step >= state.step:
                self.saving.remove_memory_snapshots()
            log.info(
                f"the run already stands at step {state.step} and trainer.max_steps is {config.max_steps}: "
                "nothing is left to do"
            )
            log.info(f"SHA-256 of the weights at step {state.step}: {self.saving.weights_sha256}")
            return False
        logger = self.run_logger
        failure = self.context.on_rank(0, lambda: logger.repeated_failure() if logger else None)
        if failure:
            self.saving.remove_memory_snapshots()
            raise NonRetryableError(failure)
        if self.run_logger:
            self.run_logger.plan(
                state.step,
                self.sampler.windows_per_epoch,
                self.compile_choice,
                self.sampler.micro_batches_by_rank(),
                self.saving.disk.store.url,
            )
        self.saving.allocate()
        events.emit("run_start", state=state, strategy=self.strategy)
        return True

    def end_run(self, stopped_by: str | None) -> None:
        """Save the present step if that was not done, wait for the write, and record the end. Collective.

        `stopped_by` is the request that stopped the run; None: the run is complete. Also removes the file
        STOP, and the snapshots in memory. Raises the errors of `save`, `Saving.finish` and `RunLogger.ended`.
        """
        if self.saving.is_missing():
            self.save(is_end=True)
        weights_sha256 = self.timer.exclude(self.saving.finish, "snapshot_wait_s")
        events.emit("run_end", state=self.state)

        def report() -> None:
            if self.run_logger:
                self.context.stop_signal.remove_stop_file()
                url, best = self.saving.disk.store.url, self.saving.disk.store.best
                phases = self.timer.phases
                self.run_logger.ended(self.state.step, stopped_by, url, weights_sha256, phases, best)

        self.context.on_all(report)
        self.saving.remove_memory_snapshots()

    def handle_nonfinite(self, grad_norm: float) -> None:
        """Count the update as skipped, or end the run, if the gradient or a loss is not finite. Collective.

        If both are finite, updates `skipped` and the loss scale. With float16, a gradient that is not finite
        only halves the loss scale, until the scale is 1. Otherwise, with trainer.on_nonfinite=skip, a
        gradient that is not finite is counted as a skipped update, up to MAX_SKIPPED - 1 in a row. For any
        other gradient or loss that is not finite, all ranks raise NonFiniteError. If a rank could not use its
        data, all ranks raise UserError instead.
        """
        config, state = self.config.trainer, self.state
        total, in_a_row = state.skipped
        are_finite = all(map(math.isfinite, self.step_losses))
        if math.isfinite(grad_norm) and are_finite:
            state.skipped = total, 0
            if state.loss_scale:
                state.loss_scale.after_step(is_finite=True)
            return
        first_window, last_window = state.windows_seen, state.windows_seen + config.batch_size - 1
        what = f"{'gradient' if are_finite else 'loss'} of windows {first_window} to {last_window}"
        is_skipped = config.on_nonfinite == "skip" and not math.isfinite(grad_norm)
        sentence = f"step {state.step + 1}: the {what} is not finite; its update is dropped"
        for data_error in self.context.all_gather_object(self.batches.error):
            if data_error is not None:
                raise UserError(data_error)
        if state.loss_scale and not math.isfinite(grad_norm) and state.loss_scale.after_step(is_finite=False):
            if self.run_logger:
                log.warning(
                    f"step {state.step + 1}: the gradient overflows float16: its update is left out, and the "
                    f"loss scale halved to {state.loss_scale.scale:g}"
                )
            return
        if is_skipped and in_a_row + 1 < MAX_SKIPPED:
            state.skipped = total + 1, in_a_row + 1
            if self.run_logger:
                log.warning(f"step {state.step + 1}: the {what} is not finite; its update is left out")
                self.run_logger.log_skipped(state.step + 1, first_window, last_window, total + 1)
            return
        if self.run_logger:
            self.run_logger.failed(self.state.step, sentence)
        self.saving.remove_memory_snapshots()  # waits: all ranks take part in writing a sharded state
        raise NonFiniteError(sentence)

    def log_training(self, grad_norm: float) -> None:
        """Record the last step's metrics, with the mean times since the last record; restart the timer."""
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
                device_name=self.environment.device,
                loss_scale=self.state.loss_scale.scale if self.state.loss_scale else None,
            )
            self.run_logger.log_training(stats, self.timer.phases)
        self.timer.reset(self.state.step)

    def evaluate(self) -> None:
        """Evaluate, and record the result unless a request to stop comes before the end. Collective."""
        losses = self.evaluator.evaluate(self.state.step)
        if losses is None:
            return
        sample = ""
        if self.state.step or self.config.snapshot.init_from:  # random weights write random characters
            sample = self.context.on_all(lambda: self.evaluator.sample(self.run_logger is not None))
        if self.context.should_stop():
            return
        if self.run_logger:
            self.run_logger.log_evaluation(self.state.step, losses, sample)
        self.has_new_best = self.saving.is_new_best(losses["val/loss"])
        self.saving.evaluated_step, self.evaluation_missing = self.state.step, False

    @contextlib.contextmanager
    def failure_handled(self) -> Iterator[None]:
        """Return a context that cleans up after an error in its block, then raises the error again.

        After a UserError, the context waits for the write of the last save, and removes the run's snapshots
        from memory. After any other Exception, the context waits only if the run has one worker. With several
        workers a peer may be gone, and the write might never end.
        """
        try:
            yield
        except UserError:
            self.saving.remove_memory_snapshots()
            raise
        except Exception:
            if self.context.world_size == 1:
                self.saving.saver.wait()  # with several workers, one may be gone, and this would not return
            raise


class Batches:
    """This rank's micro-batches, in order, from the start of this generation up to max_steps.

    `error` is the message of the UserError that reading the data has raised; None if there was none. Other
    ranks notice an error, because the losses of this rank are then NaN.
    """

    def __init__(self, run: Run, timer: StepTimer) -> None:
        self.config, self.context, self.timer = run.config, run.context, timer
        config, sampler = run.config, run.sampler
        size = config.trainer.micro_batch_size
        steps = max(0, config.trainer.max_steps - timer.first_step)
        starts = itertools.islice(sampler, steps * len(sampler.my_micro_batches()) * size)
        self.batches = run.corpus.train.batches(starts, size, run.context.device)
        self.error: str | None = None

    def next(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets on the device, (B, T) int64 each; seed torch for the dropout.

        Call this for each of this rank's micro-batches, in order. `step` and `micro_batch` are the numbers
        that determine the dropout. Once `error` is set, both tensors are zero.
        """
        began = time.perf_counter()
        inputs, targets, *on_device = self.fetch()
        events.emit("batch", step=step, micro_batch=micro_batch, inputs=inputs, targets=targets)
        self.timer.data_s += time.perf_counter() - began
        if self.config.model.dropout:
            torch.manual_seed(mix(self.config.seed, step, micro_batch))
        return on_device[0], on_device[1]

    def fetch(self) -> tuple[Tensor, ...]:
        """Return (inputs, targets, inputs on the device, targets on the device), (B, T) each.

        The first two are on the CPU. If reading the data raises UserError, sets `error` and returns zeros.
        Raises ExpectedError if token shards cannot be read.
        """
        if self.error is None:
            try:
                return next(self.batches)
            except UserError as error:
                self.error = str(error)
        shape = self.config.trainer.micro_batch_size, self.config.data.block_size
        zeros = torch.zeros(shape, dtype=torch.long)
        return zeros, zeros, zeros.to(self.context.device), zeros.to(self.context.device)
