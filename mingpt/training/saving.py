"""How a run's state is saved: which ranks write it to disk and to memory, and what the manifest says."""

import logging
import math
import time
from dataclasses import asdict
from typing import Any

from torch import Tensor

from mingpt.base import events
from mingpt.base.errors import ClaimLost, NonRetryableError, UserError
from mingpt.base.files import reason_of
from mingpt.base.urls import redact
from mingpt.config import to_dict
from mingpt.distributed.exit import JOB_ENDS
from mingpt.distributed.group import BackgroundGroup
from mingpt.report import RunLogger
from mingpt.snapshot import Keep, Manifest, MemorySaver, SnapshotSaver
from mingpt.snapshot.contents import describe_tokenizer
from mingpt.snapshot.manifest import DataFields, LossScaleFields, SoftwareFields, finite_records
from mingpt.snapshot.saver import NO_LOSS
from mingpt.training.resume import DIFFERED
from mingpt.training.run import Run

log = logging.getLogger(__name__)
LONG_WAIT_S = 5.0
MAX_FILES = 10_000  # if there are more token shards, a manifest lists none, because its size is limited


class Saving:
    """Saves the snapshots of this generation (the workers between two restarts).

    The constructor is collective. For each snapshot folder on disk, `RunFolder.keeps_snapshots` is true on
    one rank; the lowest of these ranks is the main rank. If the state is not sharded, these ranks write to
    disk, and the first worker of each node writes to the node's memory. If the state is sharded, the main
    rank writes the rows of all ranks to disk, and each rank writes its rows to memory. A snapshot counts as
    durable once the main rank has written the snapshot to disk.
    """

    def __init__(self, run: Run, run_logger: RunLogger | None) -> None:
        config, context, state, start = run.config, run.context, run.state, run.start
        self.config, self.context, self.state = config, context, state
        self.corpus, self.environment, self.run_id = start.corpus, run.environment, start.run_id
        self.run_logger = run_logger
        tokenizer = start.corpus.tokenizer
        self.tokenizer_fields = describe_tokenizer(tokenizer, start.corpus.vocab_size)
        content = tokenizer.to_bytes() if tokenizer else None
        self.store, self.folder = start.store, start.folder
        self.main_rank = start.folder.snapshots_rank  # the rank whose snapshots count as durable
        self.is_main = context.rank == self.main_rank
        self.is_sharded = state.strategy.updates_are_sharded
        # All ranks take part in writing a sharded state.
        self.writes_to_disk = start.folder.keeps_snapshots or self.is_sharded
        local_every = config.snapshot.local_every
        # If nodes share no disk, a sharded state is only on one node's disk. If that node is lost, the job
        # goes on from memory: all parts must be in memory, each on two nodes, also between two generations.
        self.is_on_one_disk = self.is_sharded and not start.folder.snapshots_are_shared
        self.local_every = config.snapshot.every if local_every is None else local_every
        self.saver = SnapshotSaver(start.store, content)
        if self.is_sharded:
            group = BackgroundGroup(context.rank, context.world_size)
            self.saver = SnapshotSaver(start.store, content, state.rows, group, self.main_rank)
        in_memory = content if context.launch.local_rank == 0 else None
        self.memory = MemorySaver(start.memory, context, state.rows, start.known.token, in_memory)
        self.last_save_step = start.durable_step  # step of the last save to disk that was begun
        # Step of the last save to disk that this rank began; at first, of the snapshot that it found, or -1.
        self.own_step = start.found.views[context.rank].step
        if self.is_sharded:  # all ranks save together, so the main rank's step is that of all
            self.own_step = start.found.views[self.main_rank].step
        steps = [step for step in self.store.steps() if step <= state.step] if self.is_main else []
        self.saver.best = min(self.store.losses_of(steps), default=NO_LOSS)
        self.best_loss = -math.inf  # the lowest validation loss so far; -inf without keep_best: none is lower
        if config.snapshot.keep_best:
            self.best_loss = context.broadcast_object(self.saver.best[0], self.main_rank)
        self.is_slow_disk_reported = False
        self.durable_step = start.durable_step  # of the last snapshot that all ranks know to be on disk
        # The last step at which a replay found that all workers compute alike. A manifest without the field
        # (older, or written without replays) counts as replayed.
        replayed_step = start.manifest.replayed_step
        self.replayed_step = start.step if replayed_step is None else replayed_step
        self.evaluated_step = start.manifest.evaluated_step  # the last step that was evaluated
        self.discarded_after = start.known.discarded_after

    @property
    def writes_to_memory(self) -> bool:
        """Whether this rank takes part when the state is saved to memory.

        If the state is sharded, all ranks take part; otherwise only the first worker of each node.
        """
        return self.is_sharded or self.context.launch.local_rank == 0

    @property
    def newest_written(self) -> int:
        """On the main rank, the step of the newest snapshot that this generation has written to disk, or 0.

        On all other ranks it is 0.
        """
        return self.saver.newest_written if self.is_main else 0

    def allocate(self) -> None:
        """Allocate the staging buffers in advance, so that no save has to allocate them. Collective.

        Call this before the first step.
        """
        if self.writes_to_disk:
            self.saver.allocate(self.tensors(self.is_main))
        if self.config.snapshot.memory_every and self.writes_to_memory:
            self.memory.allocate(self.tensors(self.context.launch.local_rank == 0))

    def note_written(self, step: int) -> None:
        """Record that the snapshot of `step` is durable, also in run.json if this rank writes run.json.

        A step that is not newer than the last durable step is ignored.
        """
        if step > self.durable_step:
            self.durable_step = step
            if self.run_logger:
                self.run_logger.history.note_durable(step)

    def is_new_best(self, loss: float) -> bool:
        """Return whether `loss` is the lowest validation loss known so far; if so, remember `loss`.

        Always returns False without snapshot.keep_best.
        """
        is_best = loss < self.best_loss
        if is_best:
            self.best_loss = loss
        return is_best

    def is_missing(self) -> bool:
        """Return whether any rank that writes to disk has yet to save the present step. Collective."""
        is_missing_here = self.writes_to_disk and self.own_step < self.state.step
        return any(self.context.all_gather_object(is_missing_here))

    def is_due_here(self, is_last: bool) -> bool:
        """Return whether this rank must save the present step. Call this only on a rank that writes to disk.

        `is_last` means that this generation saves no later step.
        """
        if is_last:
            return self.own_step < self.state.step
        is_local_due = bool(self.local_every) and self.state.step % self.local_every == 0
        # A node skips its own copy while it still writes the previous one, so that no other node has to wait.
        return self.is_sharded or self.is_main or (is_local_due and self.saver.wait(timeout_s=0.0))

    def save_to_disk(self, is_last: bool = False) -> None:
        """Copy the present state, and write the copy to disk in the background. Collective.

        On return the state may change. `is_last` means that this generation saves no later step. With
        `is_last`, each rank that writes to disk saves this step, unless already saved. If `is_last`, or if
        the previous snapshot is not known to be durable, first waits for the previous save. The new snapshot
        becomes valid only after an earlier save to memory has ended. Raises ClaimLost on a rank whose
        previous write failed because the claim (the right to write there) is lost. No other failed write
        raises an error here; `finish` raises an error if the main rank's last write failed.
        """
        memory_thread = self.memory.thread
        events.emit("save_start", kind="disk", step=self.state.step)
        if isinstance(self.saver.error, ClaimLost):
            raise self.saver.error
        if is_last or self.durable_step < self.last_save_step:
            self.wait_for_previous_save()
        self.last_save_step = self.state.step
        tensors = self.tensors(self.is_main)
        if self.writes_to_disk and self.is_due_here(is_last):
            metrics = finite_records(self.run_logger.last) if self.run_logger else {}
            manifest = self.manifest(metrics=metrics)

            def before() -> None:
                # A step that has a snapshot is never computed again, so its records must be durable.
                if self.run_logger:
                    self.run_logger.flush()
                if memory_thread:
                    memory_thread.join()

            self.own_step = self.state.step
            settings = self.config.snapshot
            keep = Keep(settings.keep_last, settings.keep_best, self.replayed_step)
            self.saver.save(manifest, tensors, keep, before)
        events.emit("save_end", kind="disk", step=self.state.step)

    def is_due_in_memory(self, is_on_disk: bool) -> bool:
        """Return whether to save the present step to memory.

        `is_on_disk` means that this step is also saved to disk.
        """
        every, is_first = self.config.snapshot.memory_every, not self.memory.newest
        if self.is_on_one_disk and (is_on_disk or is_first):
            # A generation's first step is saved, too, because a node lost before it held some of the copies.
            return every > 0
        return every > 0 and self.state.step % every == 0 and not is_on_disk

    def save_to_memory(self) -> None:
        """Copy the present state, and write the copy to memory that outlives this process. Collective.

        Nothing is saved while the previous save to memory is still being written, or if saving to memory was
        disabled after a failure.
        """
        events.emit("save_start", kind="memory", step=self.state.step)
        if self.writes_to_memory:
            tensors = self.tensors(self.context.launch.local_rank == 0)
            manifest = self.manifest(after=self.durable_step)
            self.memory.save(manifest, tensors)
        events.emit("save_end", kind="memory", step=self.state.step)

    def tensors(self, with_whole: bool) -> dict[str, Tensor]:
        """Return the tensors, by name and not copied, that this rank adds to a snapshot.

        These are this rank's rows of the sharded tensors. If the state is not sharded, or if `with_whole` is
        true, the tensors that each rank holds whole are also returned.
        """
        tensors = self.state.tensors()
        if self.is_sharded and not with_whole:
            return {name: part for name, part in tensors.items() if self.state.rows.by_rank(name)}
        return tensors

    def manifest(self, **fields: Any) -> Manifest:
        """Return a manifest of the present step, with the further fields `fields`.

        The fields that depend on the snapshot's files are added later.
        """
        state, files = self.state, dict(self.corpus.files)
        return Manifest(
            run=self.run_id,
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
            evaluated_step=self.evaluated_step,
            replayed_step=self.replayed_step if self.config.trainer.replay_every else None,
            discarded_after=self.discarded_after,
            **fields,
        )

    def wait(self) -> None:
        """Wait, without a time limit, until no rank is writing to disk any more. Collective."""
        done = False
        while not done:
            is_over = self.context.all_gather_object(self.saver.wait(timeout_s=1.0))
            done = all(is_over)

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
                f"than {self.store.url}"
            )

    def finish(self) -> None:
        """Wait until the last snapshot is on disk. Raise an error if the main rank could not write it.

        If the disk or URL cannot be written to, all ranks raise NonRetryableError. But the errors that
        `describe_failure` raises are raised only on the main rank. After a failure the snapshots in memory
        are kept, because they may be newer than those on disk. Collective.
        """
        self.wait()
        failure = self.describe_failure() if self.is_main else None
        failure = self.context.broadcast_object(failure, self.main_rank)
        if failure is None:
            return
        if self.run_logger:
            self.run_logger.failed(self.state.step, failure)
        raise NonRetryableError(failure)

    def describe_failure(self) -> str | None:
        """Return a sentence on why the last write to disk failed; None if it did not fail.

        Call this only on the main rank. If the write failed with ClaimLost, raises this error instead. On a
        local disk, an error that is neither an OSError nor a UserError is also raised.
        """
        error = self.saver.error
        if error is None:
            return None
        is_disk_error = isinstance(error, (OSError, UserError)) or not self.store.is_local
        if isinstance(error, ClaimLost) or not is_disk_error:
            raise error
        durable_step = max(self.durable_step, self.saver.newest_written)
        stands, goes_on = "there is none before it", ""
        if durable_step:
            stands, goes_on = f"the run stands at step {durable_step} there", ", which goes on from there"
        return (
            f"the snapshot of step {self.last_save_step} cannot be written to {self.store.url} "
            f"({reason_of(error)}) and {stands}: make room or repair it, "
            f"and start the same command again{goes_on}"
        )

    def discard_after(self, step: int) -> int:
        """Rename the snapshots on disk newer than `step`; remove the run's snapshots in memory. Collective.

        In each folder only one rank renames, even if all ranks take part in writing. Returns the step of the
        newest snapshot that is left on the main rank's disk; 0 if none is left.
        """
        self.wait()
        if self.folder.keeps_snapshots:
            for newer in self.store.steps():
                if newer > step:
                    self.store.quarantine(newer, DIFFERED, "suspect")
        self.remove_memory_snapshots()
        left = max([0, *self.store.steps()]) if self.is_main else 0
        return int(self.context.broadcast_object(left, self.main_rank))

    def release_memory(self, stopped_by: str | None) -> None:
        """Remove this run's snapshots from memory, because the last snapshot is on disk.

        Call this on all ranks. `stopped_by` is the request that stopped this generation; None means that the
        run is complete. JOB_ENDS has the requests after which no generation follows. After any other request,
        nothing is removed if only one of several nodes has the last snapshot on disk. The next generation may
        need the snapshots in memory. If no generation follows, a later start on this node goes on from the
        snapshots or removes them (see `MemorySnapshots.remove_leftovers`).
        """
        is_needed = self.is_on_one_disk and stopped_by not in (None, *JOB_ENDS)
        if not is_needed:
            self.remove_memory_snapshots()

    def remove_memory_snapshots(self) -> None:
        """Remove this run's snapshots from memory; each rank removes its own, so call this on all ranks.

        Not collective: the ranks exchange nothing.
        """
        if self.writes_to_memory:
            self.memory.remove()
