"""What rank 0 tells of a run while it goes: the plan, the records, the ledger, the picture."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mingpt.cluster import Cluster
from mingpt.config import Config, dump
from mingpt.data import Corpus
from mingpt.ledger import Ledger
from mingpt.metrics import Metrics, Picture, Progress, replace_file

log = logging.getLogger(__name__)


class Report:
    """Opened once the run is known to start at `step`; drops what earlier generations recorded past it."""

    def __init__(
        self, config: Config, cluster: Cluster, corpus: Corpus, run: str, step: int, changes: list[str], software: dict[str, Any], restart: bool
    ) -> None:
        self.config, self.workers, self.corpus, self.software = config, cluster.world_size, corpus, software
        run_dir = Path(config.run_dir)
        replace_file(run_dir / "config.yaml", dump(config))
        self.metrics = Metrics(run_dir, step, fresh=step == 0 and not restart)
        self.ledger = Ledger(run_dir, run, {"torch": software["torch"]})
        self.picture = Picture(run_dir, corpus.entropy_floor)
        self.died = self.ledger.begin(self.workers, step, cluster.before, restart, changes)
        self.changes, self.restart = changes, restart
        self.progress = Progress(step, config.trainer.max_steps)

    def hopeless(self) -> str | None:
        """One sentence if going on would only repeat a failure; the run is then over."""
        if sentence := self.ledger.hopeless():
            self.failed(self.ledger.generations[-1]["from_step"], sentence)
        return sentence

    def plan(self, step: int, parameters: int, windows_per_epoch: int, shares: Sequence[range], snapshots: str) -> None:
        """What is going to happen, before the first step; in a restarted generation, what happened to the one before."""
        if self.died:
            log.warning("%s", self.died)
        if self.restart:
            return
        config, plural = self.config, lambda count: "s" * (count > 1)
        log.info(
            "%s with %s parameters, %s; %d worker%s on %s, %d CPU thread%s each",
            config.model.arch, f"{parameters:,}", self.software["dtype"], self.workers, plural(self.workers),
            self.software["device"], self.software["threads"], plural(self.software["threads"]),
        )  # fmt: skip
        log.info(
            "%s: %s characters, %d distinct; %s tokens per step, %.1f steps per epoch, %d steps",
            config.data.path, f"{len(self.corpus.train.tokens) + len(self.corpus.val.tokens):,}", len(self.corpus.vocabulary),
            f"{config.trainer.batch_size * config.data.block_size:,}", windows_per_epoch / config.trainer.batch_size, config.trainer.max_steps,
        )  # fmt: skip
        idle = (os.cpu_count() or 1) - self.software["threads"]
        if self.workers == 1 and self.software["device"].startswith("cpu") and idle > 0:
            log.info(
                "%d CPU core%s idle: start more workers, which changes no bit, or raise trainer.threads, which does",
                idle,
                "s stay" if idle > 1 else " stays",
            )
        reads = [f"worker {rank} {f'reads {share.start}-{share.stop - 1}' if share else 'idles'}" for rank, share in enumerate(shares)]
        log.info("micro-batches of %d windows in a step: %s", config.trainer.micro_batch_size, ", ".join(reads))
        log.info("snapshots every %d steps to %s; %s", config.snapshot.every, snapshots, f"going on from step {step}" if step else "a fresh run")
        for change in self.changes:
            log.info("changed on purpose: %s", change)

    def training(self, step: int, values: dict[str, float | None]) -> None:
        record = self.metrics.record(step, values)
        self.progress.show(record)
        self.ledger.seen(step, record["step_s"])

    def evaluation(self, step: int, values: dict[str, float], text: str) -> None:
        self.metrics.record(step, values)
        log.info("step %d/%d  val/loss %.4f  val/bits_per_byte %.4f", step, self.config.trainer.max_steps, *values.values())
        if text:
            log.info("%s", "\n".join("    " + line for line in text.splitlines()))
        self.picture.draw(self.ledger.restarts())

    def failed(self, step: int, why: str) -> None:
        self.progress.close()
        self.ledger.end("failed", step, f"failed: {why}")

    def ended(self, step: int, stopped_by: str | None, snapshots: str) -> None:
        """The run stands at `step`, durably."""
        self.progress.close()
        self.ledger.end("stopped" if stopped_by else "finished", step, f"stopped by {stopped_by}" if stopped_by else "finished")
        self.picture.draw(self.ledger.restarts(), wait=True)
        log.info("%s at step %d: %s", f"stopped by {stopped_by}" if stopped_by else "finished", step, self.ledger.summary())
        log.info("snapshot in %s, metrics and loss.png in %s", snapshots, self.config.run_dir)
