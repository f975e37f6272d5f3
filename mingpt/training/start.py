"""The start of a generation (the workers between two restarts): all ranks take the same steps in one order.

Each rank gathers facts (facts.py), all ranks exchange them, and `plan_start` (plan.py) decides. Then the
snapshot's bytes are checked, and what the plan says is done: corrupt snapshots are renamed, records are
copied to other nodes, the data are tokenized. The result is a StartPoint, from which run.py builds the state.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from mingpt.base.errors import NodeRefused, NodesLeave, UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.config import Config, TrainerConfig
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import idle_gpus
from mingpt.report import RunStart
from mingpt.snapshot import (
    Manifest,
    MemoryFolder,
    Offer,
    Snapshot,
    Store,
    StoredState,
    find_valid,
    open_snapshot,
)
from mingpt.training.contents import check_model
from mingpt.training.facts import Site
from mingpt.training.plan import (
    DIFFERED,
    Again,
    Fault,
    Place,
    Refusal,
    Start,
    StartFacts,
    check_nodes,
    plan_start,
    settings_digest,
    skipped_snapshots,
)
from mingpt.training.run_data import Origin, load_corpus, read_tokenizer, tokenizer_path

NOT_BEGUN = Manifest.model_construct(step=0, windows=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartPoint(RunStart):
    """Everything that a generation (the workers between two restarts) starts from. `find_start` makes it.

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
        """The number of this generation, from 1: above the snapshot's, and above the count in run.json."""
        return self.plan.generation

    @property
    def was_compiled(self) -> bool | None:
        """Whether the snapshot's model was compiled; None if nothing has been trained yet."""
        return bool(self.manifest.software.compiled) if self.step else None

    @property
    def evaluation_missing(self) -> bool:
        """Whether an evaluation of this step must be made, before any further training.

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


def find_start(config: Config, context: DistributedContext) -> StartPoint:
    """Claim and open the run folder, open the data, and find the state to start from. Collective.

    With trainer.eval_only, the run folder is not claimed. Raises UserError if the settings, devices, folders,
    data or snapshots do not allow the start. If the job goes on without some nodes, raises NodeRefused on
    their ranks, and NodesLeave on all other ranks. A request to stop raises StopRequested, or ends the
    process. A rank that loses the claim raises ClaimLost. For others see `DistributedContext.settle`.
    """
    site = Site(config, context)
    arrivals = context.gather_on_all(site.arrive)
    begin = Begin(site, context.gather_on_all(lambda: site.look(arrivals)))
    site.remove_probes()
    plan, state = begin.choose()
    for line in plan.notes:
        log.info(line)
    context.settle([arrival.own for arrival in arrivals], plan.dtype, plan.threads)
    return begin.carry_out(plan, state)


def is_due(trainer: TrainerConfig, step: int) -> bool:
    """Return whether an evaluation is due after `step` steps; with step 0, at the start of a run."""
    if step == 0:
        return trainer.eval_at_start
    return step == trainer.max_steps or step % trainer.eval_every == 0


def end(refusal: Refusal, facts: Sequence[StartFacts], context: DistributedContext) -> NoReturn:
    """Raise UserError if all nodes are refused; else NodeRefused on refused nodes, NodesLeave on others."""
    if refusal.nodes is None:
        error = UserError(refusal.sentence)
        error.may_pass = refusal.may_pass
        raise error
    if context.launch.node_rank in refusal.nodes:
        raise NodeRefused(f"{refusal.sentence}; the job goes on without {refusal.hosts}")
    sentence = f"the job goes on without {refusal.hosts}: {refusal.sentence}"
    log.info(sentence)
    raise NodesLeave(sentence, [rank for rank, one in enumerate(facts) if one.node in refusal.nodes])


class Begin:
    """One rank's part in a start: chooses the plan together with the other ranks, and carries it out."""

    def __init__(self, site: Site, facts: list[StartFacts]) -> None:
        self.site, self.config, self.context, self.facts = site, site.config, site.context, facts
        self.initial: Snapshot | None = None  # of snapshot.init_from, on rank 0 of a fresh run

    def choose(self) -> tuple[Start, StoredState | None]:
        """Return (the plan, the state in its snapshot or None). Collective.

        All bytes of the plan's snapshot are checked first. If they are bad, the ranks make a new plan without
        this snapshot. If the plan is a Refusal, raises the errors of `end`.
        """
        plans = list[Start | Refusal]()

        def next_choice() -> Offer | None:
            if plans:  # its snapshot is bad, as the Reader now knows
                self.look_again({})
            while isinstance(plan := plan_start(self.facts), Again):
                self.look_again(plan.faults)
            plans.append(plan)
            return plan.found.choice if plan.found else None

        state, plan = find_valid(self.site.reader, self.context, next_choice), plans[-1]
        if plan.found and self.context.rank == 0:
            for line in skipped_snapshots(plan.found, self.config):
                log.warning(line)
        if isinstance(plan, Refusal):
            end(plan, self.facts, self.context)
        return plan, state

    def look_again(self, faults: Mapping[Place, Exception]) -> None:
        own = self.facts[self.context.rank]
        self.facts = self.context.gather_on_all(lambda: self.site.offer(own, faults))

    def read_origin(self) -> Origin:
        """Open the snapshot of snapshot.init_from; return (its manifest, its tokenizer's bytes or None)."""
        self.initial = open_snapshot(str(self.config.snapshot.init_from), check_model, weights_only=True)
        return self.initial.manifest, self.initial.read_tokenizer()

    def carry_out(self, plan: Start, state: StoredState | None) -> StartPoint:
        """Do what the plan says; `state` is that of its snapshot. Return the StartPoint. Collective."""
        config, context, site = self.config, self.context, self.site
        memory = MemoryFolder(config.snapshot.memory_path, plan.run_id, site.path)
        is_fresh = config.snapshot.init_from is not None and state is None
        origin = context.on_rank(0, self.read_origin) if is_fresh else None
        path = tokenizer_path(config, state is not None, plan.is_restart, self.facts[0].tokenizer)
        named = context.on_rank(0, lambda: read_tokenizer(path)) if path else None
        loaded = list[Corpus]()

        def prepare() -> tuple[list[Fault], dict[str, bytes]]:
            faults = self.prepare_store(plan, memory) if site.writes else []
            faults = faults or site.open_data()
            if not faults and site.data:
                is_told = context.rank == 0 and not plan.is_restart
                loaded.append(load_corpus(config, site.data, state, plan.is_restart, origin, named, is_told))
            return faults, site.read_history() if plan.source == context.rank else {}

        faults, histories = zip(*context.gather_on_all(prepare), strict=True)
        found = [replace(one, faults=here) for one, here in zip(self.facts, faults, strict=True)]
        refusal = check_nodes(found, plan.is_restart)
        if refusal:
            end(refusal, self.facts, context)
        if plan.source is not None and site.is_kept and context.rank != plan.source:
            site.write_history(histories[plan.source])
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
            pids=[place.pid for place in context.places if place.host == context.places[0].host],
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
        removes from memory all snapshots of this run but those of `plan`'s step, and calls
        `MemoryFolder.remove_leftovers`. Returns a fault if the folder cannot be written to (a full disk is
        only logged), or if a snapshot cannot be renamed, and then does no more. May raise ClaimLost.
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
            memory.clear(choice.step if choice else -1)
        try:
            if self.site.keeps_snapshots:
                store.prepare()
        except UserError as error:
            return [Fault("snapshots", {"reason": error}, error.may_pass)]
        return []
