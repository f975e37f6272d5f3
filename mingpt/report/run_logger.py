"""The RunLogger, which reports a run: what it is going to do, its metrics, and how it ended.

The seconds per step are measured between two records, without evaluations and waits for snapshots.
"""

import logging
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import torch

from mingpt.base.extras import load_extra, missing
from mingpt.base.system import usable_cores
from mingpt.config import to_yaml
from mingpt.distributed.device import Environment, gpu_facts
from mingpt.report.history import RunHistory, plural
from mingpt.report.log import ConsoleSink
from mingpt.report.metrics import RunStart, Sink, StepStats, Values, training_values
from mingpt.report.plot import LossPlot
from mingpt.report.writing import JsonlSink, ReportFile

T = TypeVar("T")
SINKS: list[Callable[[RunStart], Sink]] = [  # the sinks in addition to metrics.jsonl
    ConsoleSink,
    LossPlot,
]
# The sinks that settings ask for, as "module:function"; the module is imported when it is asked for.
TRACKERS = {
    "tensorboard": "mingpt.extras.trackers:tensorboard",
    "wandb": "mingpt.extras.trackers:tracker",
    "trackio": "mingpt.extras.trackers:tracker",
}
log = logging.getLogger(__name__)


class StepTimer:
    """Measures the seconds per step since the last `reset`.

    Code that fetches batches adds the seconds of each fetch to `data_s`.

    `phases` is {name of a kind of work: total seconds}, with names in history.PHASES. The seconds per step do
    not include this work.
    """

    def __init__(self, step: int) -> None:
        self.phases: dict[str, float] = {}
        self.reset(step)

    def reset(self, step: int) -> None:
        """Start measuring again after step `step`, with `data_s` at zero; `phases` keeps its totals."""
        self.began, self.first_step, self.data_s = time.perf_counter(), step, 0.0

    def exclude(self, work: Callable[[], T], phase: str) -> T:
        """Call `work` and return its result; the time is added to `phases[phase]`, not to the steps."""
        began = time.perf_counter()
        result = work()
        taken_s = time.perf_counter() - began
        self.began += taken_s
        self.phases[phase] = self.phases.get(phase, 0.0) + taken_s
        return result

    def seconds_per_step(self, step: int) -> tuple[float, float]:
        """Return (mean seconds of a step, mean seconds of fetching data in a step) since the last `reset`.

        `step` is the last completed step, which must be later than the step that was given to `reset`.
        """
        steps = step - self.first_step
        return (time.perf_counter() - self.began) / steps, self.data_s / steps


class RunLogger:
    """Reports a run from the step `start.step` on, on a rank that writes to a run folder.

    Constructing a RunLogger writes config.yaml, adds this generation (the workers between two restarts) to
    run.json, and drops from metrics.jsonl the records of steps that are done again. If a file cannot be
    written, one log line says so, and the run goes on. The constructor raises ClaimLost if this process has
    lost the right to write to the run folder, and the errors of importing a tracker that the settings name.
    """

    def __init__(self, start: RunStart, environment: Environment) -> None:
        self.start, self.environment, config, corpus = start, environment, start.config, start.corpus
        start.check_claim()
        self.config_file = ReportFile(start.run_dir / "config.yaml", start.may_write)
        self.history = RunHistory(start.run_dir, start.run_id, {"torch": environment.torch}, start.may_write)
        self.history.content["gpu"] = self.gpu = gpu_facts(torch.device(environment.device_type))
        self.history.content["inputs"] = {
            "data": corpus.fingerprint,
            "tokenizer": corpus.tokenizer.fingerprint() if corpus.tokenizer else "none",
            "software": asdict(environment),
        }
        self.previous_end = self.history.start_generation(start)
        # After run.json, which shows at the next start that a run has written config.yaml.
        self.config_file.replace(to_yaml(config))
        self.records = JsonlSink(start)
        self.sinks = [self.records, *(make_sink(start) for make_sink in SINKS)]
        asked = ["tensorboard" if config.report.tensorboard else None, config.report.tracker]
        for name in filter(None, asked if start.is_main else []):
            make_sink = load_extra(TRACKERS[name])
            if make_sink:
                self.sinks.append(make_sink(start))
        self.last = self.records.last  # the last record of each kind, for the manifest
        recorded = self.last.get("train", {"step": 0})["step"]
        if recorded < start.logged_step:
            self.history.note_missing(recorded + 1, start.logged_step)

    def repeated_failure(self) -> str | None:
        """If this job's previous generations failed at the same step, call `failed` and return the reason.

        The reason is a sentence. Otherwise return None. For details see `RunHistory.repeated_failure`.
        """
        sentence = self.history.repeated_failure()
        if sentence:
            self.failed(self.history.generations[-1]["from_step"], sentence)
        return sentence

    def plan(
        self,
        step: int,
        windows_per_epoch: int,
        compile_choice: str,
        assignment: Sequence[Sequence[int]],
        snapshots: str,
    ) -> None:
        """Log how the previous generation ended, if `RunHistory.start_generation` returned a line.

        Unless this is a restart, also log what the run is going to do. `step` is the step from which the run
        goes on. A window is a token sequence. `compile_choice` says whether the model is compiled, and why.
        `assignment` has, for each rank, the numbers of its micro-batches in a step. `snapshots` is the folder
        or URL of the snapshots.
        """
        if self.previous_end:
            log.log(logging.WARNING if self.start.is_main else logging.INFO, "%s", self.previous_end)
        if self.start.is_restart:
            return
        config, corpus, environment = self.start.config, self.start.corpus, self.environment
        trainer, threads = config.trainer, environment.threads
        origin = f"resumed from step {step}" if step else "a fresh run"
        log.info(
            f"{origin} in {self.start.run_dir}: {trainer.max_steps} steps of "
            f"{trainer.batch_size * config.data.block_size:,} tokens; every {config.snapshot.every} steps a "
            f"snapshot is written to {snapshots}"
        )
        log.info(
            f"model: {config.model.arch}, {self.start.parameters:,} parameters, {environment.dtype}; "
            f"{compile_choice}"
        )
        log.info(
            f"data: {config.data.path}, {len(corpus.train.tokens):,} tokens for training, "
            f"{len(corpus.val.tokens):,} tokens for validation, vocabulary of {corpus.vocab_size}; "
            f"{windows_per_epoch / trainer.batch_size:.1f} steps per epoch"
        )
        shares = " or ".join(map(str, sorted(set(map(len, assignment)))))
        pids = " ".join(map(str, self.start.pids))
        log.info(
            f"{plural(self.start.workers, 'worker')} on {environment.device} ({trainer.parallel}"
            f"{', sharded optimizer' if trainer.shard_optimizer else ''}; pids {pids}), per worker "
            f"{plural(threads, 'CPU thread')} and {shares} of a step's "
            f"{trainer.batch_size // trainer.micro_batch_size} micro-batches of "
            f"{plural(trainer.micro_batch_size, 'window')}"
        )
        idle = usable_cores() - threads
        if self.start.workers == 1 and environment.device.startswith("cpu") and idle > 0:
            log.info(
                f"unused CPU cores: {idle}; more workers would use them without changing the result, more "
                "trainer.threads would change it"
            )
        if missing:
            log.info(f"going on without {', '.join(sorted(missing))}, which this copy of the program lacks")
        for change in self.start.changes:
            log.info(f"changed on purpose: {change}")

    def log_values(self, step: int, values: Values) -> None:
        """Give the values of metrics after `step` to all sinks.

        Raises ClaimLost if this process has lost the right to write to the run folder.
        """
        self.start.check_claim()
        for sink in self.sinks:
            sink.log(step, values)

    def log_training(self, stats: StepStats, phases: dict[str, float] | None = None) -> None:
        self.log_values(stats.step, training_values(stats))
        self.history.note_step(stats.step, stats.step_s, phases)

    def log_skipped(self, step: int, first_window: int, last_window: int, count: int) -> None:
        """Record that the update of `step` was skipped.

        `first_window` and `last_window` are the numbers of the step's first and last window (a sequence of
        tokens). The run has skipped `count` updates so far. Raises ClaimLost as `log_values` does.
        """
        self.log_values(step, {"skipped/first_window": first_window, "skipped/last_window": last_window})
        self.history.note_skipped(count)

    def log_evaluation(self, step: int, values: Values, sample: str) -> None:
        self.log_values(step, values)
        if sample:
            log.info("\n".join("    " + line for line in sample.splitlines()))

    def flush(self) -> None:
        """Make all records so far durable, if possible. Any thread may call this."""
        self.config_file.retry()
        self.records.flush()

    def failed(self, step: int, why: str) -> None:
        """Report that this generation failed after `step`; `why` says why. Closes the sinks."""
        self._end("failed", step, f"failed: {why}")

    def ended(
        self,
        step: int,
        stopped_by: str | None,
        snapshots: str,
        weights_sha256: str,
        phases: dict[str, float] | None = None,
        best: tuple[float, int] = (math.inf, -1),
    ) -> None:
        """Report that the run finished, or that the request `stopped_by` stopped it. Closes the sinks.

        Call this last, once the snapshot of `step` is durable. `stopped_by` is None if the run finished.
        `snapshots` is the folder or URL of the snapshots, and `weights_sha256` the SHA-256, in hex, of the
        file of weights of `step`. `phases` is `StepTimer.phases`. `best` is (lowest validation loss of a
        snapshot that is kept, its step), (inf, -1) if unknown. Raises ClaimLost as `log_values` does.
        """
        self.start.check_claim()
        how = f"stopped by {stopped_by}" if stopped_by else "finished"
        self.history.content |= {"durable_step": step, "weights_sha256": weights_sha256}
        self._end("stopped" if stopped_by else "finished", step, how, phases)
        can_go_on = stopped_by and self.start.config.snapshot.resume != "never"
        goes_on = "; the same command goes on" if can_go_on else ""
        log.info(f"{how} at step {step}: {self.history.summary()}{goes_on}")
        if self.gpu:
            peak_mb, memory = torch.cuda.max_memory_allocated() / 1e6, self.gpu["memory"]
            log.info(f"worker 0 used at most {peak_mb:,.0f} MB of tensors, of the GPU's {memory}")
        log.info(f"the snapshot is in {snapshots}; metrics.jsonl and loss.png are in {self.start.run_dir}")
        log.info(f"SHA-256 of the weights at step {step}: {weights_sha256}")
        command = ["python", "-m", "mingpt", "sample", str(self.start.run_dir)]
        loss, best_step = best
        if loss < math.inf:
            log.info(f"lowest validation loss of a snapshot that is kept: {loss:.4f} at step {best_step}")
            command.append("--best")
        log.info(f"next: {shlex.join(command)}")

    def _end(self, status: str, step: int, how: str, phases: dict[str, float] | None = None) -> None:
        """Record in run.json that this generation ended after `step`, and `how`; close the sinks.

        `status` is that of the run from now on. Metrics that cannot be written are recorded as lost.
        """
        self.flush()
        if self.records.file.waiting:
            self.history.note_missing(self.records.first_waiting, step)
        self.history.end(status, step, how, phases)
        for sink in self.sinks:
            sink.close()
