"""How a run's state is saved: to which tiers (disk, memory), by which ranks, and what the manifest says."""

import logging
import math
import platform
import time
import uuid
from dataclasses import asdict

from mingpt.base import events
from mingpt.base.errors import ClaimLost, NonRetryableError, UserError
from mingpt.base.files import reason_of
from mingpt.base.urls import redact
from mingpt.config import to_dict
from mingpt.distributed.exit import is_lost_peer
from mingpt.report import RunLogger
from mingpt.snapshot import Manifest, Saver, Status, Store, Tier
from mingpt.snapshot.manifest import DataFields, LossScaleFields, SoftwareFields, finite_records
from mingpt.training.contents import describe_tokenizer
from mingpt.training.plan import DIFFERED
from mingpt.training.run import Run

log = logging.getLogger(__name__)
LONG_WAIT_S = 5.0
MAX_FILES = 10_000  # if there are more token shards, a manifest lists none, because its size is limited


class Saving:
    """Saves the snapshots of this generation (the workers between two restarts).

    The constructor is collective. The tier `disk` is the folder or URL of snapshots, the tier `memory` the
    memory of a node. If the state is not sharded, the lowest rank that sees a folder of snapshots writes
    there, and the first worker of each node writes to the node's memory. If the state is sharded, one rank
    writes to both tiers or, if not all nodes share a folder, two ranks on different nodes do. A snapshot
    counts as durable once the main rank, the first writer, has written the snapshot to disk.
    """

    def __init__(self, run: Run, run_logger: RunLogger | None) -> None:
        config, context, state, start = run.config, run.context, run.state, run.start
        self.config, self.context, self.state = config, context, state
        self.corpus, self.environment, self.start = start.corpus, run.environment, start
        self.run_logger = run_logger
        tokenizer = start.corpus.tokenizer
        self.tokenizer_fields = describe_tokenizer(tokenizer, start.corpus.vocab_size)
        self.is_sharded = state.strategy.updates_are_sharded
        self.disk, self.memory = self.make_disk_tier(), self.make_memory_tier()
        self.main_rank = self.disk.writers[0]
        self.is_main = context.rank == self.main_rank
        tiers = [self.memory, self.disk] if self.memory.every else [self.disk]
        self.saver = Saver(tiers, tokenizer.to_bytes() if tokenizer else None, state.rows, context.rank)
        steps = [step for step in self.disk.store.steps() if step <= state.step] if self.is_main else []
        self.disk.store.find_best(steps)
        self.best_loss = -math.inf  # the lowest validation loss so far; -inf without keep_best: none is lower
        if config.snapshot.keep_best:
            self.best_loss = context.all_gather_object(self.disk.store.best[0])[self.main_rank]
        self.is_slow_disk_reported = self.is_busy = False
        self.last_save_step = start.durable_step  # step of the last save to disk that was begun
        self.durable_step = start.durable_step  # of the last snapshot that all ranks know to be on disk
        # The last step at which a replay found that all workers compute alike. A manifest without the field
        # (older, or written without replays) counts as replayed.
        replayed_step = start.manifest.replayed_step
        self.replayed_step = start.step if replayed_step is None else replayed_step
        self.evaluated_step = start.manifest.evaluated_step  # the last step that was evaluated

    def make_disk_tier(self) -> Tier:
        """Return the tier of the folder or URL of snapshots, as this rank sees it."""
        settings, start, rank = self.config.snapshot, self.start, self.context.rank
        writers = start.plan.snapshot_writers
        # A sharded state is saved by all ranks together.
        begun = start.plan.found.step_on_disk(writers[0] if self.is_sharded else rank)
        is_copy = not self.is_sharded and rank != writers[0]  # on a node's own disk
        every = settings.local_every if is_copy and settings.local_every is not None else settings.every
        return Tier(
            "disk",
            start.store,
            every,
            settings.keep_last,
            writers[:2] if self.is_sharded else writers,
            settings.keep_best,
            may_skip=is_copy,  # so that no other node waits for this one
            begun=begun,
        )

    def make_memory_tier(self) -> Tier:
        """Return the tier of the memory of the nodes, as this rank sees it.

        Each writer has a folder of its own, because the agents of two nodes may run on one machine.
        """
        places, start = self.context.places, self.start
        writers = [rank for rank, place in enumerate(places) if place.local_rank == 0]
        return Tier(
            "memory",
            Store(str(start.memory.root / uuid.uuid4().hex)),
            self.config.snapshot.memory_every,
            keep=1,
            writers=start.plan.snapshot_writers[:2] if self.is_sharded else writers,
            may_skip=True,
            is_durable=False,
            replaces=start.memory.stores(),
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """What `note_counts` needs of each rank; the ranks' numbers are added up.

        These are the step of the newest snapshot that this generation wrote to disk (0 except on the main
        rank), 1 if this rank is writing, and 1 if its last save to memory failed, unless a peer was lost.
        """
        written = self.disk.written if self.is_main else 0
        error = self.memory.error
        # If a peer is lost, its generation ends, and the next one needs the snapshots in memory.
        has_failed = error is not None and not is_lost_peer(error)
        return written, not self.saver.wait(timeout_s=0.0), has_failed

    def note_counts(self, written: int, busy: int, failed: int) -> None:
        """Set `is_busy` and `durable_step` from all ranks' summed `counts`; if `failed`, give up memory."""
        self.is_busy = busy > 0
        if failed:
            self.give_up_memory()
        if written > self.durable_step:
            self.durable_step = written
            if self.run_logger:
                self.run_logger.history.note_durable(written)

    def allocate(self) -> None:
        """Prepare for the first step: allocate the staging buffer, and the folders in memory. Collective.

        If a node's memory has no room for two states, or no folder, no rank saves to memory. Each writer of
        the first tier (memory or, if nothing is saved there, disk) that does not see the snapshot from which
        this generation starts then gets a copy. A write that fails raises no error here.
        """
        rank, tensors = self.context.rank, self.state.tensors()
        if self.memory in self.saver.tiers and rank in self.memory.writers:
            shapes = self.state.rows.shapes
            nbytes = sum(math.prod(shapes[name]) * tensors[name].element_size() for name in tensors)
            try:
                self.start.memory.create(self.memory.store, nbytes)
            except OSError as error:
                self.memory.error = error
        if any(self.context.all_gather_object(self.memory.error is not None)):
            self.give_up_memory()
        if any(map(self.saver.takes_part, self.saver.tiers)):
            self.saver.allocate(tensors)
        tier = self.saver.tiers[0]
        lacking = [writer for writer in tier.writers if not self.start.plan.found.is_held_by(writer)]
        if self.start.snapshot and lacking and (self.is_sharded or rank in lacking):
            self.saver.save(self.manifest(), tensors, [tier])
            self.saver.wait()

    def give_up_memory(self) -> None:
        """Save no more to memory. All ranks call this.

        If this rank writes to disk, its next snapshot there replaces those in its node's memory.
        """
        if self.memory not in self.saver.tiers:
            return
        self.saver.tiers.remove(self.memory)
        error = self.memory.error
        if error and self.context.rank in self.memory.writers:
            log.warning(
                f"no snapshots in memory: {self.start.memory.root.parent} cannot be used "
                f"({reason_of(error)}, on {platform.node()}); after a kill the run resumes from disk: make "
                "room for two states, set snapshot.memory_path to a larger folder, or snapshot.memory_every=0"
            )
        self.disk.replaces += self.start.memory.stores()

    def is_new_best(self, loss: float) -> bool:
        """Return whether `loss` is lower than the validation losses known so far; if so, remember `loss`.

        Always returns False without snapshot.keep_best.
        """
        is_best = loss < self.best_loss
        if is_best:
            self.best_loss = loss
        return is_best

    def is_missing(self) -> bool:
        """Return whether any rank that saves to disk has not begun to save the present step. Collective."""
        is_missing_here = self.saver.takes_part(self.disk) and self.disk.begun < self.state.step
        return any(self.context.all_gather_object(is_missing_here))

    def save(self, is_end: bool = False, is_wanted: bool = False) -> None:
        """Copy the present state if a save is due, and write the copy in the background. Collective.

        May first wait until the previous save has ended. On return the state may change. `is_end` means that
        this generation saves no later step, `is_wanted` that the step is to be on disk, for its validation
        loss. With either, or at a multiple of snapshot.every, a rank raises ClaimLost if its last write to
        disk failed because the claim (the right to write there) is lost. No other failed write raises an
        error here; `finish` raises an error if the main rank's last write to disk failed.
        """
        step = self.state.step
        # A node that writes by itself leaves out its own saves while it is busy, and nobody waits for it.
        is_busy = self.is_busy if self.is_sharded else not self.saver.wait(timeout_s=0.0)
        status = Status(is_end, is_wanted, is_busy)
        due = [tier for tier in self.saver.tiers if tier.is_due(step, status)]
        for tier in due:
            events.emit("save_start", kind=tier.name, step=step)
        if is_end or is_wanted or step % self.config.snapshot.every == 0:
            if isinstance(self.disk.error, ClaimLost):
                raise self.disk.error
            if is_end or self.durable_step < self.last_save_step:
                self.wait_for_previous_save()
            self.last_save_step = step
        if any(map(self.saver.takes_part, due)):
            metrics = finite_records(self.run_logger.last) if self.run_logger else {}
            # A step that has a snapshot is never computed again, so its records must be durable.
            before = self.run_logger.flush if self.run_logger else lambda: None
            self.saver.save(self.manifest(metrics), self.state.tensors(), due, before)
        for tier in due:
            events.emit("save_end", kind=tier.name, step=step)

    def manifest(self, metrics: dict[str, dict[str, float]] | None = None) -> Manifest:
        """Return a manifest of the present step, without the fields that depend on the snapshot's files.

        `metrics` has the last record of each kind, as in {"val": {"step": 100, "val/loss": 1.5}}; None stands
        for those in the manifest from which this generation started.
        """
        state, files = self.state, dict(self.corpus.files)
        return Manifest(
            run=self.start.run_id,
            generation=self.start.generation,
            step=state.step,
            windows=state.windows_seen,
            skipped=list(state.skipped),
            loss_scale=LossScaleFields(**asdict(state.loss_scale)) if state.loss_scale else None,
            config=to_dict(self.config),
            tokenizer=self.tokenizer_fields,
            data=DataFields(
                path=redact(self.config.data.path),
                sha256=self.corpus.fingerprint,
                files=files if len(files) <= MAX_FILES else {},
            ),
            software=SoftwareFields(**asdict(self.environment)),
            metrics=self.start.manifest.metrics if metrics is None else metrics,
            evaluated_step=self.evaluated_step,
            replayed_step=self.replayed_step if self.config.trainer.replay_every else None,
            after=self.durable_step,
        )

    def wait(self) -> None:
        """Wait, without a time limit, until no rank is writing any more. Collective."""
        done = False
        while not done:
            done = all(self.context.all_gather_object(self.saver.wait(timeout_s=1.0)))

    def wait_for_previous_save(self) -> None:
        """Wait until the previous save has ended on all ranks. Collective.

        Rank 0 logs the first wait of more than LONG_WAIT_S seconds.
        """
        began = time.monotonic()
        self.wait()
        waited_s = time.monotonic() - began
        if waited_s > LONG_WAIT_S and not self.is_slow_disk_reported and self.context.rank == 0:
            self.is_slow_disk_reported = True
            log.warning(
                f"training waited {waited_s:.1f} s until the snapshot of step {self.last_save_step} was "
                f"written: raise snapshot.every (now {self.config.snapshot.every}) or write to a faster disk "
                f"than {self.disk.store.url}"
            )

    @property
    def weights_sha256(self) -> str:
        """The SHA-256, in hex, of the file of weights in the newest snapshot that this rank wrote to disk.

        If this rank has written none, the file is that of the snapshot from which this generation started.
        If there is no such snapshot either, the result is "".
        """
        files = self.disk.files or self.start.manifest.files
        return files[0].sha256 if files else ""

    def finish(self) -> str:
        """Wait until the last snapshot is on disk; return the SHA-256, in hex, of its file of weights.

        If the main rank's last write to disk failed, all ranks raise NonRetryableError. But if
        `describe_failure` raises an error, only the main rank raises it, and the others lose a peer. After a
        failure the snapshots in memory are kept: they may be newer than those on disk. Collective.
        """
        self.wait()
        failure = self.describe_failure() if self.is_main else None
        failure, sha256 = self.context.all_gather_object((failure, self.weights_sha256))[self.main_rank]
        if failure is None:
            return sha256
        if self.run_logger:
            self.run_logger.failed(self.state.step, failure)
        raise NonRetryableError(failure)

    def describe_failure(self) -> str | None:
        """Return a sentence on why the last write to disk failed; None if it did not fail.

        Call this only on the main rank. If the write failed with ClaimLost, raises this error instead. On a
        local disk, an error that is neither an OSError nor a UserError is also raised.
        """
        error, store = self.disk.error, self.disk.store
        if error is None:
            return None
        is_disk_error = isinstance(error, (OSError, UserError)) or not store.is_local
        if isinstance(error, ClaimLost) or not is_disk_error:
            raise error
        durable_step = max(self.durable_step, self.disk.written)
        stands, goes_on = "there is none before it", ""
        if durable_step:
            stands, goes_on = f"the run stands at step {durable_step} there", ", which goes on from there"
        return (
            f"the snapshot of step {self.last_save_step} cannot be written to {store.url} "
            f"({reason_of(error)}) and {stands}: make room or repair it, "
            f"and start the same command again{goes_on}"
        )

    def set_aside_after(self, step: int) -> int:
        """Rename the snapshots newer than `step`, on each disk and in each node's memory: none is used again.

        Collective. Returns the step of the newest snapshot that is left on the main rank's disk; 0 if none is
        left. A rank that cannot list or rename its files raises OSError or an error of fsspec's driver.
        """
        self.wait()
        stores = [self.disk.store] if self.start.keeps_snapshots else []
        stores += self.start.memory.stores() if self.context.launch.local_rank == 0 else []
        for store in stores:
            for newer in store.steps():
                if newer > step:
                    store.quarantine(newer, DIFFERED, "suspect")
        left = max([0, *self.disk.store.steps()]) if self.is_main else 0
        return self.context.all_gather_object(left)[self.main_rank]

    def remove_memory_snapshots(self) -> None:
        """Wait for the present save, and remove this run's snapshots from the memory of this node.

        Not collective: the ranks exchange nothing. Call this on all ranks.
        """
        self.saver.wait()
        if self.context.launch.local_rank == 0:
            self.start.memory.clear()
