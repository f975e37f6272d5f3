"""What happens at the start of a generation (the workers between two restarts): `plan_start` decides it.

Each rank gathers StartFacts, plain values, and all ranks exchange them. `plan_start` is a pure function: all
ranks call it with the same facts, and get the same answer. The answer is a Start, which says from which
snapshot the run goes on and who writes what; a Refusal, if the run does not start; or Again, if some of the
snapshots that were offered must not be used, so that the ranks have to look for older ones.

REFUSALS lists all reasons why a run does not start. In a job's first generation a reason ends the job. In a
later generation it concerns only the nodes at fault, and the job goes on without them (`refuse`).
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers, differences, flatten, result_settings, to_dict
from mingpt.distributed.device import DEVICES_DIFFER, common_dtype
from mingpt.snapshot.manifest import Manifest, is_distrusted
from mingpt.snapshot.search import Found, Offer, choose

# {kind of a reason: the sentence}. `reason` is a sentence of the module that found the fault.
REFUSALS = {
    # A fault of a node, or of one of its workers.
    "device": "{reason}",
    "disk": "the disk of {place} does not answer within {limit_s:g} s: look at its mount",
    "not ours": "run_dir {run_dir} holds {names}, which a run would replace, and no run.json of a run: choose "
    "another run_dir, or move these files away",
    "not writable": "run_dir {run_dir} cannot be written to: {reason}",
    "claimed": "{reason}",
    "data": "{reason}",
    "snapshots": "{reason}",
    "private": "snapshot.path {url} lives in the memory of one process and cannot bring back workers that "
    "died: use a folder or an object store",
    # The nodes contradict each other.
    "devices": DEVICES_DIFFER,
    "settings": "the workers were started with different settings: those on {host} differ from those on "
    "{other} ({changes})",
    "different data": "the data in {path} differ between {hosts}: copy the same files to every node",
    "different runs": "the nodes hold different runs in {run_dir} ({runs}): give the job another run_dir, or "
    "remove {run_dir} from the nodes of the other run",
    # The settings do not fit the cluster, or the run that is there.
    "workers": "{reason}",
    "nothing to resume": "there is no valid snapshot in {url} to resume from, and snapshot.resume=must needs "
    "one",
    "nothing to evaluate": "there is no valid snapshot in {url} to evaluate",
    "resume=never": "{url} holds a snapshot of step {step}, and snapshot.resume=never does not go on from it: "
    "choose another run_dir",
    "other data": "{path} is not the data that the snapshots in {url} were trained on: choose another "
    "run_dir, with snapshot.init_from to keep the weights",
    "other run": "{url} holds snapshots of run {run}, and {run_dir} the records of run {recorded}: choose "
    "another snapshot.path, or another run_dir",
    "init_from": "snapshot.init_from starts a fresh run and {url} holds a snapshot of step {step}: choose "
    "another run_dir",
    "other model": "{url} holds snapshots of another model ({changes}): set that back, or choose another "
    "run_dir",
    "other settings": "{url} holds snapshots of a run with other settings ({changes}): set them back, choose "
    "another run_dir, or go on with the new ones by snapshot.resume=changed",
    "other hardware": "the snapshots in {url} were computed on {then} and the workers now have {now}: start "
    "the job on such hardware again, or go on with this one by snapshot.resume=changed",
    # Snapshots are away or lost.
    "unreadable": "the snapshots in {url} cannot be read ({reasons}): start again when they can be, or choose "
    "another run_dir",
    "lost": "no valid snapshot is left in {url} ({reasons}), where one of step {step} was written: choose "
    "another run_dir, or begin anew by snapshot.resume=never",
}
# Settings that change no result but must be the same on all workers.
SAME_EVERYWHERE = ("trainer.eval_only", "trainer.parallel", "trainer.shard_optimizer", "trainer.fsdp_reshard")
# The settings that can change an evaluation, by the beginnings of their names.
EVALUATED = ("data.", "model.", "trainer.dtype:", "trainer.compile:", "trainer.fsdp_param_dtype:")
DIFFERED = "workers have computed differently since"
NO_RECORDS = "run.json is gone: the disk of run_dir may be away"
Place = tuple[int, int, int]  # of an offer: the rank that reads it, the number of that rank's Store, the step


class Fault(NamedTuple):
    """Why a node cannot take part: a key of REFUSALS, and the values in the sentence."""

    kind: str
    values: dict[str, Any]
    may_pass: bool = False  # whether the fault may pass without a change by the user


class Records(NamedTuple):
    """What run.json on a rank's node says about a run; the defaults are those of a node without a run."""

    of_this_job: bool = False  # whether an earlier generation of this job has passed the checks of its start
    last_step: int = -1  # the last step that is recorded
    run: str | None = None  # the run's id
    job_start: int | None = None  # the step from which the newest job in run.json began; None: not recorded
    durable_step: int = 0  # the step of the newest snapshot on disk
    distrusted: Sequence[dict[str, Any]] = ()  # an entry for each replay that found different results
    generations: int = 0  # the number of generations on record
    is_reported: bool = True  # whether the end of the run is on record, or nothing is recorded
    settings: str = ""  # digest of the settings with which the newest job trains; "" for none


NO_RUN = Records()


@dataclass(frozen=True)
class StartFacts:
    """What one rank knows when a generation starts."""

    config: Config
    node: int = 0
    host: str = ""
    device: str = "cpu"  # type of the rank's device
    dtype: str = "float32"  # the dtype that trainer.dtype means on this device
    threads: int = 1
    program: str = ""  # the code and the version of torch; "" if there is one node
    faults: Sequence[Fault] = ()
    was_restarted: bool = False  # whether the launcher's store, or its count of restarts, tells of a restart
    keeper: int = 0  # the lowest rank that sees this rank's run folder: it writes the records there
    snapshot_keeper: int = 0  # the lowest rank that sees this rank's folder of snapshots
    records: Records = NO_RUN
    data: str = ""  # fingerprint of the data; "" if this rank has not opened them
    tokenizer: str = ""  # path of the tokenizer.json beside the data; "" if there is none
    url: str = ""  # where snapshots on disk are
    offers: Sequence[Offer] = ()
    fits: bool = True  # whether the weights of the newest snapshot offered here fit this rank's model
    token: str = ""  # a random id; that of rank 0 becomes the id of a run that begins


@dataclass(frozen=True)
class Refusal:
    """Why the run does not start on some nodes, or at all. The exit code is 2."""

    kind: str  # a key of REFUSALS
    sentence: str
    nodes: frozenset[int] | None = None  # the nodes that are refused while the job goes on; None: all are
    hosts: str = ""  # the hosts of these nodes
    may_pass: bool = False  # whether a restart may help


@dataclass(frozen=True)
class Again:
    """Offers that must not be used: {place: (why, whether the snapshot is corrupt)}."""

    faults: dict[Place, tuple[str, bool]]


@dataclass(frozen=True)
class Start:
    """What a generation starts from; the same on all ranks."""

    run_id: str
    is_restart: bool  # false in a job's first generation
    generation: int  # the number of this generation in the run, from 1
    found: Found  # the snapshot, if any, and all that were offered
    changes: list[str]  # settings changed on purpose, each "key: old -> new"
    dtype: str
    threads: int
    keepers: list[int]  # for each rank, the lowest rank that sees its run folder
    snapshot_writers: list[int]  # the lowest rank that sees each folder of snapshots
    is_reported: bool  # whether the end of the run is on record on all nodes
    warnings: list[str] = field(default_factory=list)

    @property
    def snapshot(self) -> Manifest | None:
        """The manifest of the snapshot from which the run goes on; None in a fresh run."""
        return self.found.choice.manifest if self.found.choice else None

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see the same run folder."""
        return len(set(self.keepers)) == 1


def plan_start(facts: Sequence[StartFacts]) -> Start | Refusal | Again:
    """Return what happens at this start; `facts` has the facts of all ranks, in the order of the ranks."""
    is_restart = was_restarted(facts)
    refusal = check_nodes(facts, is_restart) or check_agreement(facts, is_restart)
    if refusal:
        return refusal
    config, records = facts[0].config, [one.records for one in facts]
    kept = kept_run(records)
    offers = [offer for one in facts for offer in one.offers]
    unusable = find_unusable(facts, is_restart)
    if unusable:
        return Again(unusable)
    on_disk = [offer.step for offer in offers if offer.is_on_disk]
    choice = choose(offers, None if is_restart else max([0, *on_disk]))
    found = Found(choice, facts[0].url, offers)
    changes = changed_settings(choice.manifest, config) if choice and choice.manifest else []
    if is_restart:
        changes = []
    if config.trainer.eval_only:
        changes = [change for change in changes if change.startswith(EVALUATED)]
    refusal = check_lost(facts, found, is_restart, kept) or check_snapshot(
        facts, found, is_restart, kept.run, changes
    )
    if refusal:
        return refusal
    manifest = choice.manifest if choice else None
    dtype, threads = common_dtype([one.dtype for one in facts], facts[0].device), facts[0].threads
    if manifest:
        threads = manifest.software.threads
        if config.trainer.dtype == "auto" and manifest.software.dtype == "float16":
            dtype = "float16"  # which all GPUs have
        refusal = check_hardware(facts, manifest, dtype, is_restart)
        if refusal:
            return refusal
    # A run that goes on in a new run folder has fewer generations on record than its snapshots count.
    numbers = [1 + max(one.generations for one in records), (manifest.generation if manifest else 0) + 1]
    return Start(
        # If the run folder is new, the run is the one whose snapshot was found.
        run_id=kept.run or (manifest.run if manifest else None) or facts[0].token,
        is_restart=is_restart,
        generation=max(numbers + [entry["before_generation"] for entry in distrusted_entries(records)]),
        found=found,
        changes=changes,
        dtype=dtype,
        threads=threads,
        keepers=[one.keeper for one in facts],
        snapshot_writers=sorted({one.snapshot_keeper for one in facts}),
        is_reported=all(one.is_reported for one in records),
        warnings=[*programs_differ(facts), *skipped_snapshots(found, config)],
    )


def was_restarted(facts: Sequence[StartFacts]) -> bool:
    """Return whether this is not the job's first generation, by all evidence that there is.

    The launcher's store may have been lost with its host: then only run.json shows an earlier generation. And
    run.json may have been lost with its disk: then only the store shows it. One witness is enough.
    """
    return any(one.was_restarted or one.records.of_this_job for one in facts)


def kept_run(records: Iterable[Records]) -> Records:
    """Return the records of the run that goes on; if two parts of a job differ, that which has come further.

    Records of this job come first, then those of the later step.
    """
    return max((one for one in records if one.run), default=Records(), key=lambda one: one[:3])


def distrusted_entries(records: Iterable[Records]) -> list[dict[str, Any]]:
    """Return the entries about wrong results in the run.json of all nodes, each once."""
    entries = sorted((entry for one in records for entry in one.distrusted), key=str)
    return [entry for entry, _ in itertools.groupby(entries)]


def refuse(
    facts: Sequence[StartFacts],
    is_restart: bool,
    nodes: Iterable[int] | None,
    kind: str,
    may_pass: bool = False,
    **values: Any,
) -> Refusal:
    """Return the refusal with the sentence of `kind` in REFUSALS, because of a fault of `nodes`.

    The job goes on without these nodes if this is not its first generation, and if there are other nodes.
    With `nodes` None, or in all other cases, the job ends. With several nodes, the sentence then names the
    first host that is at fault.
    """
    sentence = REFUSALS[kind].format(**values)
    at_fault = frozenset(nodes or ())
    hosts = list(dict.fromkeys(one.host for one in facts if one.node in at_fault))
    everybody = {one.node for one in facts}
    if is_restart and at_fault and at_fault != everybody:
        return Refusal(kind, sentence, at_fault, ", ".join(hosts), may_pass)
    if hosts and len(everybody) > 1 and kind != "settings":
        sentence = f"{sentence} (on {hosts[0]})"
    return Refusal(kind, sentence, may_pass=may_pass)


def check_nodes(facts: Sequence[StartFacts], is_restart: bool) -> Refusal | None:
    """Return why some nodes cannot take part; None if all can. Of several reasons the first one counts."""
    faults = [(one, fault) for one in facts for fault in one.faults]
    for kind in REFUSALS:
        found = [(one.node, fault) for one, fault in faults if fault.kind == kind]
        if found:
            nodes, first = [node for node, _ in found], found[0][1]
            return refuse(facts, is_restart, nodes, kind, first.may_pass, **first.values)
    return None


def check_agreement(facts: Sequence[StartFacts], is_restart: bool) -> Refusal | None:
    """Return in what the nodes contradict each other; None if they agree.

    In a restart, the nodes that differ from the rest of the job are at fault: the job's settings are on
    record in run.json, its data and its kind of device in its snapshots.
    """
    recorded = next((one.records.settings for one in facts if one.records.of_this_job), "")
    newest = max(
        (offer for one in facts for offer in one.offers if offer.manifest),
        default=None,
        key=lambda one: one.step,
    )
    manifest = newest.manifest if newest and is_restart else None

    def at_fault(
        value: Callable[[StartFacts], str], right: str | None
    ) -> tuple[list[StartFacts], StartFacts]:
        """Return the ranks whose value is not `right`, and one that has it; by default, rank 0's is right."""
        example = next((one for one in facts if value(one) == right), facts[0])
        return [one for one in facts if value(one) not in ("", value(example))], example

    wrong, example = at_fault(lambda one: one.device, manifest.software.device_type if manifest else None)
    if wrong:
        devices = ", ".join(one.device for one in facts)
        return refuse(facts, is_restart, [one.node for one in wrong], "devices", devices=devices)
    wrong, example = at_fault(lambda one: settings_digest(one.config), recorded)
    if wrong:
        values: dict[str, Any] = {"host": wrong[0].host, "other": example.host}
        changes = different_settings(example.config, wrong[0].config)
        return refuse(facts, is_restart, [one.node for one in wrong], "settings", changes=changes, **values)
    wrong, example = at_fault(lambda one: one.data, manifest.data.sha256 if manifest else None)
    if wrong:
        hosts = " and ".join(dict.fromkeys([example.host, wrong[0].host]))
        path = wrong[0].config.data.path
        return refuse(
            facts, is_restart, [one.node for one in wrong], "different data", path=path, hosts=hosts
        )
    records = [one.records for one in facts]
    kept = kept_run(records)
    others = [one for one in facts if one.records.run not in (None, kept.run)]
    if others:
        runs = dict.fromkeys(f"run {one.records.run[:8]} on {one.host}" for one in facts if one.records.run)
        values: dict[str, Any] = {"run_dir": others[0].config.run_dir, "runs": "; ".join(runs)}
        is_known = is_restart and kept.of_this_job
        return refuse(facts, is_known, [one.node for one in others], "different runs", **values)
    config = facts[0].config
    if not is_restart:
        try:
            check_workers(config, len(facts))
        except UserError as error:
            return refuse(facts, is_restart, None, "workers", reason=error)
    return None


def must_be_equal(config: Config) -> dict[str, str]:
    """Return {name: value} of the settings that change no result, and must be the same on all workers."""
    settings, path = flatten(to_dict(config)), config.snapshot.path
    same = {name: str(settings[name]) for name in SAME_EVERYWHERE}
    same["snapshot.path"] = "null" if path is None else ("a URL" if "://" in path else "a folder")
    return same


def different_settings(one: Config, other: Config) -> str:
    """Return in what two workers' settings differ, as "key: one -> other; ..."; "" if in nothing."""
    here, there = must_be_equal(one), must_be_equal(other)
    changes = differences(to_dict(one), to_dict(other))
    changes += [f"{name}: {here[name]} -> {there[name]}" for name in here if here[name] != there[name]]
    return "; ".join(changes)


def programs_differ(facts: Sequence[StartFacts]) -> list[str]:
    programs = {one.host: one.program for one in facts}
    if len(set(programs.values())) < 2:
        return []
    return [f"the nodes run different programs, which may compute different bits: {programs}"]


def changed_settings(manifest: Manifest, config: Config) -> list[str]:
    """Return the settings that affect the result and differ from the manifest's, as "key: old -> new".

    If trainer.compile is auto in `config`, a difference in trainer.compile is left out.
    """
    changes = differences(manifest.config, to_dict(config))
    if config.trainer.compile != "auto":
        return changes
    return [change for change in changes if not change.startswith("trainer.compile:")]


def settings_digest(config: Config) -> str:
    """Return a digest of all settings that must be the same on all workers of a job."""
    settings = [sorted(result_settings(to_dict(config)).items()), must_be_equal(config)]
    return hashlib.sha256(repr(settings).encode()).hexdigest()


def find_unusable(facts: Sequence[StartFacts], is_restart: bool) -> dict[Place, tuple[str, bool]]:
    """Return the offers that other nodes' records forbid: {place: (why, whether the snapshot is corrupt)}.

    A snapshot may hold wrong results of a worker (`is_distrusted`). A node that joined may have brought a
    snapshot that is not of this job: a later one than that from which the job began, with other settings or
    data. Such a snapshot is not corrupt, and must not be renamed.
    """
    records = [one.records for one in facts]
    distrusted = [(entry["after"], entry["before_generation"]) for entry in distrusted_entries(records)]
    job_start = max((one.job_start for one in records if one.job_start is not None), default=None)
    unusable: dict[Place, tuple[str, bool]] = {}
    for offer in (offer for one in facts for offer in one.offers):
        if offer.fault or offer.manifest is None:
            continue
        place = offer.reader, offer.store, offer.step
        if is_distrusted(offer.manifest, distrusted):
            unusable[place] = DIFFERED, True
        elif is_restart and job_start is not None and offer.step > job_start:
            changes = changed_settings(offer.manifest, facts[0].config)
            changes += ["data"] if offer.manifest.data.sha256 != facts[0].data else []
            if changes:
                unusable[place] = f"it is not of this job ({'; '.join(changes)})", False
    return unusable


def check_lost(facts: Sequence[StartFacts], found: Found, is_restart: bool, kept: Records) -> Refusal | None:
    """Return why a run must not begin at step 0: it has, or may have, a snapshot past step 0.

    Returns None if a valid snapshot past step 0 was found. Snapshots that cannot be read always refuse the
    start. Otherwise a run may begin anew with snapshot.resume=never, and with trainer.eval_only.
    """
    config = facts[0].config
    if found.choice and found.choice.step > 0:
        return None
    errors = [str(offer) for offer in found.unreadable()]
    if is_restart and kept.run is None:
        errors.append(NO_RECORDS)
    if errors:
        values: dict[str, Any] = {"url": found.where, "reasons": shorten(errors)}
        return refuse(facts, is_restart, None, "unreadable", may_pass=True, **values)
    completed = max((offer.step for offer in found.on_disk()), default=0)
    recorded = max(one.records.durable_step for one in facts)
    begins_anew = config.snapshot.resume == "never" and not is_restart
    newest = max(completed, recorded)
    if newest == 0 or begins_anew or config.trainer.eval_only:
        return None
    reasons = [str(offer) for offer in found.on_disk() if offer.fault]
    if recorded > completed:
        reasons.append(f"run.json tells of one of step {recorded}, which no node has")
    values: dict[str, Any] = {"url": found.where, "reasons": shorten(reasons), "step": newest}
    return refuse(facts, is_restart, None, "lost", **values)


def check_snapshot(
    facts: Sequence[StartFacts], found: Found, is_restart: bool, run: str | None, changes: list[str]
) -> Refusal | None:
    """Return why the run must not go on from the snapshot that was found, or without one; None if it may.

    `run` is the id of the run on record; None if there is none. `changes` are the settings that differ from
    the snapshot's. In a restart only the data count: the job's first generation has passed all other checks.
    """
    config, resume = facts[0].config, facts[0].config.snapshot.resume
    url, offer = found.where, found.choice
    kind = ""
    values: dict[str, Any] = {"url": url, "changes": "; ".join(changes), "run_dir": config.run_dir}
    if offer is None or offer.manifest is None:
        if resume == "must" and not is_restart:
            kind = "nothing to resume"
        elif config.trainer.eval_only:
            kind = "nothing to evaluate"
        return refuse(facts, is_restart, None, kind, **values) if kind else None
    manifest, is_first = offer.manifest, not is_restart
    sets_weights = any(change.startswith("snapshot.init_from:") for change in changes)
    is_other_run = run and manifest.run not in (None, run) and not config.trainer.eval_only
    if resume == "never" and is_first:
        kind = "resume=never"
    elif manifest.data.sha256 != facts[0].data:
        kind = "other data"
    elif is_first and is_other_run:
        kind = "other run"
    elif config.snapshot.init_from and sets_weights:
        kind = "init_from"
    elif changes and not facts[offer.reader].fits:
        kind = "other model"
    elif changes and resume != "changed":
        kind = "other settings"
    values |= {"step": offer.step, "path": config.data.path, "run": manifest.run, "recorded": run}
    return refuse(facts, is_restart, None, kind, **values) if kind else None


def check_hardware(
    facts: Sequence[StartFacts], manifest: Manifest, dtype: str, is_restart: bool
) -> Refusal | None:
    """Return why the run must not go on with another kind of device, or in another dtype; None if it may.

    Both may change in a job's first generation with snapshot.resume=changed. They may also change if nothing
    more is trained.
    """
    config, then = facts[0].config, manifest.software
    is_allowed = config.snapshot.resume == "changed" and not is_restart
    is_over = manifest.step >= config.trainer.max_steps or config.trainer.eval_only
    if (then.device_type, then.dtype) == (facts[0].device, dtype) or is_allowed or is_over:
        return None
    before, now = f"{then.device_type} in {then.dtype}", f"{facts[0].device} and {dtype}"
    return refuse(facts, is_restart, None, "other hardware", url=facts[0].url, then=before, now=now)


def shorten(reasons: list[str]) -> str:
    """Return the first three of `reasons` in one line, without repetitions."""
    return "; ".join(dict.fromkeys(reasons[:3]))


def skipped_snapshots(found: Found, config: Config) -> list[str]:
    """Return a line for each snapshot on disk, and each folder, that a rank could not read.

    With trainer.eval_only also a line for each corrupt snapshot; a run that trains renames these.
    """
    skipped = found.on_disk() if config.trainer.eval_only else found.unreadable()
    lines = {(offer.step, offer.where, offer.fault) for offer in skipped if offer.fault}
    return [
        fault if step < 0 else f"snapshot of step {step} in {where} skipped: {fault}"
        for step, where, fault in sorted(lines, reverse=True)
    ]
