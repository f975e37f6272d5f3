"""The start of a generation (the workers between two restarts), in the same order on all ranks.

Each rank gathers facts (facts.py), all ranks exchange them, and `plan_start` (plan.py) decides. Then the
snapshot's bytes are checked, and what the plan says is done: corrupt snapshots are renamed, records are
copied to nodes that lack them, the data are tokenized. The result is a StartPoint, from which run.py builds
the state.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from mingpt.base.errors import NodeRefused, PeersMissing, UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.config import Config, TrainerConfig
from mingpt.data.json_tokenizer import read_named_tokenizer
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import idle_gpus
from mingpt.report import RunStart
from mingpt.snapshot import Manifest, MemoryFolder, Snapshot, Store, StoredState, open_snapshot
from mingpt.snapshot.search import Content
from mingpt.training.contents import check_model
from mingpt.training.facts import Site
from mingpt.training.plan import (
    DIFFERED,
    Again,
    Fault,
    Refusal,
    Start,
    StartFacts,
    check_nodes,
    plan_start,
    settings_digest,
)
from mingpt.training.run_data import Origin, load_corpus, tokenizer_path

NOT_BEGUN = Manifest.model_construct(step=0, windows=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartPoint(RunStart):
    """Everything that this generation starts from. `find_start` makes a StartPoint on each rank.

    Most fields are the same on all ranks. Fields about this process, or about files on this node, may differ,
    such as `is_main` and `is_kept`.
    """

    plan: Start
    is_kept: bool  # whether this rank writes the run's records: the lowest rank that sees the folder does
    keeps_snapshots: bool  # whether this rank writes snapshots: the lowest rank that sees their folder does
    store: Store
    memory: MemoryFolder
    snapshot: StoredState | None  # the state that the run goes on from; None in a fresh run
    initial: Snapshot | None  # the one of snapshot.init_from, on rank 0 of a fresh run

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest; in a fresh run NOT_BEGUN, an incomplete manifest of step 0."""
        return self.snapshot.manifest if self.snapshot else NOT_BEGUN

    @property
    def generation(self) -> int:
        """The number of this generation, from 1: larger than those in run.json and in the snapshot."""
        return self.plan.generation

    @property
    def was_compiled(self) -> bool | None:
        """Whether the snapshot's model was compiled; None if nothing has been trained yet."""
        return bool(self.manifest.software.compiled) if self.step else None

    @property
    def evaluation_missing(self) -> bool:
        """Whether an evaluation must be made before training goes on from this step.

        False if `is_due` says that no evaluation is due, or if the step is past trainer.max_steps. Otherwise
        true at step 0, because a run that starts again at step 0 drops the records of step 0. At a later
        step, true unless the snapshot's manifest records an evaluation of the step (`evaluated_step`).
        """
        trainer = self.config.trainer
        if self.step > trainer.max_steps or not is_due(trainer, self.step):
            return False
        return self.step == 0 or self.manifest.evaluated_step != self.step

    @property
    def nothing_left(self) -> bool:
        """Whether a new job has nothing to do: the run has reached max_steps and is not recorded as running.

        False in a restart, or if an evaluation is missing. A run stays recorded as running if the last job
        died before it recorded the end.
        """
        is_complete = self.snapshot is not None and self.step >= self.config.trainer.max_steps
        return is_complete and self.plan.is_reported and not self.is_restart and not self.evaluation_missing


class Reading(NamedTuple):
    """What one rank has read for all, as the plan says."""

    content: Content | None = None  # of the snapshot, if this rank reads it, and its bytes are valid
    origin: Origin | None = None  # of snapshot.init_from, on rank 0 of a fresh run
    tokenizer: tuple[str, bytes | UserError | None] = ("", None)  # that data.tokenizer names, on rank 0


def find_start(config: Config, context: DistributedContext) -> StartPoint:
    """Claim and open the run folder, open the data, and find the state to start from. Collective.

    With trainer.eval_only, the run folder is not claimed. Raises UserError if the settings, folders, data or
    snapshots do not allow the start. If the job goes on without some nodes, raises NodeRefused on their
    ranks, and PeersMissing on all other ranks. A request to stop raises StopRequested, or ends the process.
    """
    begin = Begin(Site(config, context))
    arrivals = context.gather_on_all(begin.site.arrive)
    facts = context.gather_on_all(lambda: begin.site.look(arrivals))
    begin.site.remove_probes()
    plan, readings = begin.choose(facts)
    for line in plan.warnings if context.rank == 0 else ():
        log.warning(line)
    context.settle([arrival.own for arrival in arrivals], plan.dtype, plan.threads)
    return begin.carry_out(plan, readings)


def is_due(trainer: TrainerConfig, step: int) -> bool:
    """Return whether an evaluation is due after `step` steps; with step 0, at the start of a run."""
    if step == 0:
        return trainer.eval_at_start
    return step == trainer.max_steps or step % trainer.eval_every == 0


def end(refusal: Refusal, context: DistributedContext) -> NoReturn:
    """Raise what a refusal means for this rank: UserError, or NodeRefused and PeersMissing."""
    if refusal.nodes is None:
        error = UserError(refusal.sentence)
        error.may_pass = refusal.may_pass
        raise error
    if context.launch.node_rank in refusal.nodes:
        raise NodeRefused(f"{refusal.sentence}; the job goes on without {refusal.hosts}")
    sentence = f"the job goes on without {refusal.hosts}: {refusal.sentence}"
    log.info(sentence)
    raise PeersMissing(sentence)


class Begin:
    """Carries out the plan of a start, on one rank."""

    def __init__(self, site: Site) -> None:
        self.site, self.config, self.context = site, site.config, site.context
        self.facts: list[StartFacts] = []
        self.state: StoredState | None = None
        self.initial: Snapshot | None = None

    def choose(self, facts: list[StartFacts]) -> tuple[Start, list[Reading]]:
        """Return the plan, once the bytes of its snapshot are known to be valid, and the ranks' readings."""
        context, site = self.context, self.site
        while True:
            self.facts, plan = facts, plan_start(facts)
            if isinstance(plan, Refusal):
                end(plan, context)
            faults = plan.faults if isinstance(plan, Again) else {}
            if isinstance(plan, Start):
                readings = context.gather_on_all(functools.partial(self.read, plan))
                choice = plan.found.choice
                content = readings[choice.reader].content if choice else None
                if choice is None:
                    return plan, readings
                if content:
                    self.state = site.reader.state_of(choice, content)
                    return plan, readings
            own = facts[context.rank]
            facts = context.gather_on_all(functools.partial(site.offer, own, faults))

    def read(self, plan: Start) -> Reading:
        """Read what this rank has to read for all: the bytes of the snapshot, and tokenizers."""
        rank, choice, weights = self.context.rank, plan.found.choice, self.config.snapshot.init_from
        content = self.site.reader.verify(choice) if choice and choice.reader == rank else None
        if rank > 0:
            return Reading(content)
        origin = None
        if weights and not choice:
            self.initial = open_snapshot(weights, check_model, weights_only=True)
            origin = self.initial.manifest, self.initial.read_tokenizer()
        beside = [one.tokenizer for one in self.facts]
        path = tokenizer_path(self.config, choice is not None, plan.is_restart, beside)
        tokenizer: tuple[str, bytes | UserError | None] = ("", None)
        if path:
            try:
                tokenizer = path, read_named_tokenizer(path)
            except UserError as error:
                tokenizer = path, error
        return Reading(content, origin, tokenizer)

    def carry_out(self, plan: Start, readings: Sequence[Reading]) -> StartPoint:
        """Do what the plan says; return what this generation starts from. Collective."""
        config, context, site, state = self.config, self.context, self.site, self.state
        memory = MemoryFolder(config.snapshot.memory_path, plan.run_id, site.path)
        source = None if plan.is_shared else plan.source
        loaded = []

        def prepare() -> tuple[list[Fault], dict[str, bytes]]:
            faults = self.prepare_store(plan, memory) if site.writes else []
            faults = faults or site.open_data()
            if faults or site.data is None:
                return faults, {}
            is_told = context.rank == 0 and not plan.is_restart
            origin, named = readings[0].origin, readings[0].tokenizer
            loaded.append(load_corpus(config, site.data, state, plan.is_restart, origin, named, is_told))
            return [], site.read_history() if source == context.rank else {}

        done = context.gather_on_all(prepare)
        facts = [replace(one, faults=faults) for one, (faults, _) in zip(self.facts, done, strict=True)]
        refusal = check_nodes(facts, plan.is_restart)
        if refusal:
            end(refusal, context)
        if source is not None and site.is_kept and context.rank != source:
            site.write_history(done[source][1])
        idle = idle_gpus(config.trainer.device, context.launch)
        if idle:
            log.info(idle)
        manifest = state.manifest if state else NOT_BEGUN
        log_every = manifest.settings.trainer.log_every if state else 1
        return StartPoint(
            config=config,
            corpus=loaded[0],
            run_id=plan.run_id,
            step=manifest.step,
            is_restart=plan.is_restart,
            durable_step=max(0, plan.found.step_on_disk()),
            changes=plan.changes,
            workers=context.world_size,
            hosts=[host for _, host in sorted({(one.node, one.host) for one in self.facts})],
            previous=context.previous_generation,
            process_began=context.exit.began_at,
            job=site.claim.holder.job,
            settings=settings_digest(config),
            is_main=context.rank == 0,
            logged_step=manifest.step // log_every * log_every,
            check_claim=site.claim.check,
            may_write=site.claim.may_write,
            plan=plan,
            is_kept=site.is_kept,
            keeps_snapshots=site.keeps_snapshots,
            store=site.store,
            memory=memory,
            snapshot=state,
            initial=self.initial,
        )

    def prepare_store(self, plan: Start, memory: MemoryFolder) -> list[Fault]:
        """Rename corrupt snapshots on disk, and remove useless snapshots from memory.

        A rank that writes snapshots to a folder prepares the folder for saving. The first worker of each node
        removes from memory all snapshots but those of the step that was found, and calls
        `MemoryFolder.remove_leftovers`.
        """
        store, choice = self.site.store, plan.found.choice
        if self.site.keeps_snapshots:
            for step, reason in plan.found.corrupt(self.context.rank).items():
                try:
                    store.quarantine(step, reason, "suspect" if reason == DIFFERED else "damaged")
                except DriverError as error:
                    said = f"the corrupt snapshot of step {step} in {store.url} ({reason}) cannot be renamed"
                    return [Fault("snapshots", {"reason": f"{said}: {reason_of(error)}"})]
        if self.site.is_first:
            memory.remove_leftovers()
            memory.clear(choice.step if choice else None)
        try:
            if self.site.keeps_snapshots:
                store.prepare()
        except UserError as error:
            return [Fault("snapshots", {"reason": error}, error.may_pass)]
        return []
