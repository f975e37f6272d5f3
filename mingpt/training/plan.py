"""What happens at the start of a generation (the workers between two restarts): `plan_start` decides it.

Each rank gathers StartFacts, plain values, and all ranks exchange them. `plan_start` is a pure function: all
ranks call it with the same facts, and get the same answer. The answer is a Start, which says from which
snapshot the run goes on and who writes what; a Refusal, if the run does not start; or Again, if some of the
snapshots that were offered must not be used, so that the ranks have to look for older ones.

REFUSALS has the reasons of a Refusal. `refuse` decides whom a reason concerns: all nodes or, in a restart or
a later round (a common start of workers by all agents), only the nodes at fault. Then the other nodes start
again, without the facts of these nodes.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.config import Config, check_workers, differences, flatten, result_settings, to_dict
from mingpt.distributed.device import DEVICES_DIFFER, common_dtype
from mingpt.snapshot.manifest import Manifest, is_distrusted
from mingpt.snapshot.search import Found, Offer, choose

# {kind of a reason: the sentence}. `reason` is a sentence of the module that found the fault.
REFUSALS = {
    # A fault of a node, or of one of its workers.
    "device": "{reason}",
    "disk": "the disk of {place} does not answer within {limit_s:g} s: look at its mount",
    "not ours": "run_dir {run_dir} holds {names}, which a run would replace, and no run.json of a run: "
    "choose another run_dir, or move these files away",
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
    "different data": "the data in {path} differ between {other} and {host}: copy the same files to every "
    "node",
    "different runs": "the nodes hold different runs in {run_dir} ({runs}): give the job another run_dir, or "
    "remove {run_dir} from the nodes of the other run",
    # The settings do not fit the cluster, or the run that is there.
    "workers": "{reason}",
    "fsdp": "trainer.parallel=fsdp needs CPUs or CUDA GPUs: set trainer.device=cpu",
    "tokenizer": "there is no tokenizer.json beside {path} on {host}, but on other nodes",
    "nothing to resume": "there is no valid snapshot in {url} to resume from, and snapshot.resume=must needs "
    "one",
    "nothing to evaluate": "there is no valid snapshot in {url} to evaluate",
    "resume=never": "{url} holds a snapshot of step {step}, and snapshot.resume=never does not go on from "
    "it: choose another run_dir",
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
    "unreadable": "the snapshots in {url} cannot be read ({reasons}): start again when they can be, or "
    "choose another run_dir",
    "lost": "no valid snapshot is left in {url} ({reasons}), where one of step {step} was written: choose "
    "another run_dir, or begin anew by snapshot.resume=never",
}
# Settings that change no result but must be the same on all workers.
SAME_EVERYWHERE = (
    "trainer.eval_only",
    "trainer.parallel",
    "trainer.shard_optimizer",
    "trainer.fsdp_reshard",
    "snapshot.path",  # only whether it is a folder or a URL
)
# The settings that can change an evaluation, by the beginnings of their names.
EVALUATED = ("data.", "model.", "trainer.dtype:", "trainer.compile:", "trainer.fsdp_param_dtype:")
OTHER_MODEL = ("model.arch:", "model.n_layer:", "model.n_head:", "model.n_embd:", "data.vocab_size:")
DIFFERED = "workers have computed differently since"
NAME_HOSTS = ("settings", "different data", "different runs")  # sentences that say which hosts are at fault
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
    # An entry for each replay that found different results: the last step with equal ones is its "after".
    distrusted: Sequence[dict[str, Any]] = ()
    generations: int = 0  # the number of generations on record
    is_reported: bool = True  # whether the end of the run is on record, or nothing is recorded
    settings: str = ""  # digest of the settings with which the newest job trains; "" for none


NO_RUN, NO_OFFER = Records(), Offer(-1, False, "", 0, 0)


@dataclass(frozen=True)
class StartFacts:
    """What one rank knows when a generation (the workers between two restarts) starts."""

    config: Config
    node: int = 0
    host: str = ""
    device: str = "cpu"  # type of the rank's device
    dtype: str = "float32"  # the dtype that trainer.dtype means on this device
    threads: int = 1
    program: str = ""  # the code and the version of torch; "" if there is one node
    faults: Sequence[Fault] = ()
    was_restarted: bool = False  # whether the launcher's store, or its count of restarts, tells of a restart
    round: int = 1  # how many times the agents have started workers together; 1 also if that is not known
    keeper: int = 0  # the lowest rank that sees this rank's run folder: it writes the records there
    snapshot_keeper: int = 0  # the lowest rank that sees this rank's folder of snapshots
    records: Records = NO_RUN
    data: str = ""  # fingerprint of the data; "" if this rank has not opened them
    tokenizer: str = ""  # path of the tokenizer.json beside the data; "" if there is none
    url: str = ""  # where snapshots on disk are
    offers: Sequence[Offer] = ()
    token: str = ""  # a random id; that of rank 0 becomes the id of a run that begins


@dataclass(frozen=True)
class Refusal:
    """Why the run does not start on some nodes, or at all."""

    kind: str  # a key of REFUSALS
    sentence: str
    nodes: frozenset[int] | None = None  # the nodes that are refused while the job goes on; None: all are
    hosts: str = ""  # the hosts of these nodes
    may_pass: bool = False  # whether a restart may help
    found: Found | None = None  # what was found, if the reason is a snapshot, or that there is none


@dataclass(frozen=True)
class Again:
    """Snapshots that were offered but must not be used, and why: the ranks have to look for others."""

    faults: dict[Place, Exception]


@dataclass(frozen=True)
class Start:
    """What a generation (the workers between two restarts) starts from; the same on all ranks."""

    run_id: str
    is_restart: bool  # false in a job's first generation
    generation: int  # the number of this generation in the run, from 1
    found: Found  # the snapshot, if any, and all that were offered
    changes: list[str]  # settings changed on purpose, each "key: old -> new"
    dtype: str
    threads: int
    source: int | None  # the rank whose node's records go to nodes that do not share its folder
    snapshot_writers: list[int]  # the lowest rank that sees each folder of snapshots
    is_reported: bool  # whether the end of the run is on record on all nodes
    notes: list[str]  # lines for the log


def plan_start(facts: Sequence[StartFacts]) -> Start | Refusal | Again:
    """Return what happens at this start; `facts` has the facts of all ranks, in the order of the ranks."""
    is_restart = was_restarted(facts)
    refusal = check_nodes(facts, is_restart) or check_agreement(facts, is_restart)
    if refusal:
        return refusal
    unusable = find_unusable(facts, is_restart)
    if unusable:
        return Again(unusable)
    config, records = facts[0].config, [one.records for one in facts]
    recorded_run = kept_run(records).run
    # The memory of a node may hold snapshots of other runs that were trained in the same folder. And before a
    # job begins, a user may have removed snapshots from disk, to go back: then one in memory that was saved
    # after the removed ones does not count. Of the rest, the snapshot of the highest step is chosen.
    every = [offer for one in facts for offer in one.offers]
    offers = [offer for offer in every if offer.is_on_disk or is_of_run(offer, recorded_run)]
    on_disk = [offer.step for offer in offers if offer.is_on_disk]
    choice = choose(offers, newest_on_disk=None if is_restart else max([0, *on_disk]))
    found = Found(choice, facts[0].url, offers)
    manifest = found.choice.manifest if found.choice else None
    dtype, threads = common_dtype([one.dtype for one in facts], facts[0].device), facts[0].threads
    changes = changed_settings(manifest, config) if manifest and not is_restart else []
    if config.trainer.eval_only:
        changes = [change for change in changes if change.startswith(EVALUATED)]
    if manifest:
        threads = manifest.software.threads
        if config.trainer.dtype == "auto" and manifest.software.dtype == "float16":
            dtype = "float16"  # which all GPUs have
    refusal = check_lost(facts, found, is_restart, recorded_run) or check_choice(
        facts, found, is_restart, recorded_run, changes, dtype
    )
    if refusal:
        return replace(refusal, found=found)
    # A run that goes on in a new run folder has fewer generations on record than its snapshots count.
    generations = [manifest.generation if manifest else 0, *(one.generations for one in records)]
    distrusted = [entry["before_generation"] for entry in distrusted_entries(records)]
    generation = max([1 + max(generations), *distrusted])
    return Start(
        # If the run folder is new, the run is the one whose snapshot was found.
        run_id=recorded_run or (manifest.run if manifest else None) or facts[0].token,
        is_restart=is_restart,
        generation=generation,
        found=found,
        changes=changes,
        dtype=dtype,
        threads=threads,
        source=find_source(facts, manifest.step if manifest else 0),
        snapshot_writers=sorted({one.snapshot_keeper for one in facts}),
        is_reported=all(one.is_reported for one in records),
        notes=notes_on(facts, threads, generation),
    )


def was_restarted(facts: Sequence[StartFacts]) -> bool:
    """Return whether an earlier generation (workers between two restarts) of this job is known to have begun.

    The launcher's store may have been lost with its host: then only run.json shows an earlier generation. And
    run.json may have been lost with its disk: then only the store shows it.
    """
    return any(one.was_restarted or one.records.of_this_job for one in facts)


def kept_run(records: Iterable[Records]) -> Records:
    """Return, of the nodes' records, those of the run that goes on; the defaults if no node has a run.

    Records of this job come before others, then those with the later last step.
    """
    return max((one for one in records if one.run), default=Records(), key=lambda one: one[:3])


def is_of_run(offer: Offer, run: str | None) -> bool:
    """Return whether a snapshot is known to be of the run with this id."""
    return run is not None and offer.manifest is not None and offer.manifest.run == run


def find_source(facts: Sequence[StartFacts], step: int) -> int | None:
    """Return the rank whose node has the most complete records up to `step`.

    Returns None if no node has records of a run, or if one rank writes the records of all nodes.
    """
    known = [
        (len(one.records.distrusted), min(one.records.last_step, step), one.records.generations, -rank)
        for rank, one in enumerate(facts)
        if one.keeper == rank and one.records.run
    ]
    is_shared = len({one.keeper for one in facts}) == 1
    return -max(known)[-1] if known and not is_shared else None


def distrusted_entries(records: Iterable[Records]) -> list[dict[str, Any]]:
    """Return all entries of `records` on workers that may have computed wrongly (history.Distrusted)."""
    return [entry for one in records for entry in one.distrusted]


def refuse(
    facts: Sequence[StartFacts], is_restart: bool, at_fault: Sequence[StartFacts], kind: str, **values: Any
) -> Refusal:
    """Return the refusal with the sentence REFUSALS[kind], made with `values`, because of ranks `at_fault`.

    In a restart or a later round (a common start of workers by all agents), the job goes on without the nodes
    of these ranks if it has other nodes. Otherwise, or if no ranks are named, all nodes are refused.
    """
    sentence, nodes = REFUSALS[kind].format(**values), frozenset(one.node for one in at_fault)
    hosts = list(dict.fromkeys(one.host for one in at_fault))
    everybody = {one.node for one in facts}
    is_later = is_restart or any(one.round > 1 for one in facts)
    if is_later and nodes and nodes != everybody:
        return Refusal(kind, sentence, nodes, ", ".join(hosts))
    if hosts and len(everybody) > 1 and kind not in NAME_HOSTS:
        sentence = f"{sentence} (on {hosts[0]})"
    return Refusal(kind, sentence)


def check_nodes(facts: Sequence[StartFacts], is_restart: bool) -> Refusal | None:
    """Return a Refusal because of all ranks that have a fault; None if there are none.

    Its reason is the first fault of the lowest of these ranks.
    """
    faulty = [one for one in facts if one.faults]
    if not faulty:
        return None
    kind, values, may_pass = faulty[0].faults[0]
    return replace(refuse(facts, is_restart, faulty, kind, **values), may_pass=may_pass)


def check_agreement(facts: Sequence[StartFacts], is_restart: bool) -> Refusal | None:
    """Return a Refusal if the nodes contradict each other, or if the settings do not suit them; else None.

    At fault are nodes whose device type, settings, data or run differ from what is on record: in run.json or,
    in a restart, in the run's snapshots. If nothing is on record, or no node has the value on record,
    nodes that differ from rank 0 are at fault. An unknown value ("") is no fault. Settings do not suit if
    they ask for fsdp on Apple's GPU, or if a job begins with more workers than a step has micro-batches.
    """
    config, kept = facts[0].config, kept_run(one.records for one in facts)
    offers = [offer for one in facts for offer in one.offers if is_restart and is_of_run(offer, kept.run)]
    manifest = max(offers, default=NO_OFFER, key=lambda one: one.step).manifest
    rules: list[tuple[str, Callable[[StartFacts], str], str | None]] = [
        ("devices", lambda one: one.device, manifest.software.device_type if manifest else None),
        ("settings", lambda one: settings_digest(one.config), kept.settings),
        ("different data", lambda one: one.data, manifest.data.sha256 if manifest else None),
        ("different runs", lambda one: one.records.run or "", kept.run),
    ]
    for kind, value, right in rules:
        example = next((one for one in facts if value(one) == right), facts[0])
        wrong = [one for one in facts if value(one) not in ("", value(example))]
        if wrong:
            runs = [f"run {one.records.run[:8]} on {one.host}" for one in facts if one.records.run]
            here, there = shared_settings(example.config), shared_settings(wrong[0].config)
            changes = [f"{name}: {here[name]} -> {there[name]}" for name in here if here[name] != there[name]]
            is_known = is_restart and (kind != "different runs" or kept.of_this_job)
            return refuse(
                facts, is_known, wrong, kind, host=wrong[0].host, other=example.host, path=config.data.path,
                devices=", ".join(one.device for one in facts), run_dir=config.run_dir,
                changes="; ".join(changes),
                runs="; ".join(dict.fromkeys(runs)),
            )  # fmt: skip
    if config.trainer.parallel == "fsdp" and facts[0].device == "mps":
        return refuse(facts, is_restart, [], "fsdp")
    try:
        if not is_restart:
            check_workers(config, len(facts))
    except UserError as error:
        return refuse(facts, is_restart, [], "workers", reason=error)
    return None


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that all workers must share, by name; snapshot.path only as null, folder or URL."""
    settings, path = to_dict(config), config.snapshot.path
    place = "null" if path is None else ("a URL" if "://" in path else "a folder")
    flat = flatten(settings) | {"snapshot.path": place}
    return result_settings(settings) | {name: flat[name] for name in SAME_EVERYWHERE}


def settings_digest(config: Config) -> str:
    """Return the SHA-256, in hex, of the settings that must be the same on all workers: `shared_settings`."""
    return hashlib.sha256(repr(sorted(shared_settings(config).items())).encode()).hexdigest()


def notes_on(facts: Sequence[StartFacts], threads: int, generation: int) -> list[str]:
    """Return lines for the log on generation number `generation`, which uses `threads` threads per worker."""
    notes, given, programs = [], facts[0].threads, {one.host: one.program for one in facts}
    if len(set(programs.values())) > 1:
        notes.append(f"the nodes run different programs, which may compute different bits: {programs}")
    if threads != given:
        notes.append(f"using {threads} CPU threads per worker, as this run began with, not {given}")
    for entry in distrusted_entries(one.records for one in facts):
        if entry["before_generation"] == generation:
            workers, after = " or ".join(entry["workers"]), entry["after"]
            notes.append(f"{workers} computed wrongly: nothing that was saved after step {after} is used")
    return list(dict.fromkeys(notes))


def changed_settings(manifest: Manifest, config: Config) -> list[str]:
    """Return the settings that affect the result and differ from the manifest's, as "key: old -> new".

    If trainer.compile is auto in `config`, a difference in trainer.compile is left out.
    """
    changes = differences(manifest.config, to_dict(config))
    if config.trainer.compile != "auto":
        return changes
    return [change for change in changes if not change.startswith("trainer.compile:")]


def find_unusable(facts: Sequence[StartFacts], is_restart: bool) -> dict[Place, Exception]:
    """Return {place of an offer: error} for offers without a fault whose snapshots must not be used.

    - CorruptSnapshot if a worker may have computed the snapshot wrongly: the snapshot is past the last step
      at which all workers agreed, and not of a generation after the one that found this (`is_distrusted`).
    - UnreadableSnapshot, in a restart, if the snapshot has other settings or data, and is past the step from
      which, as recorded, the job began. A node that joined may have brought it. It must not be renamed.
    """
    records = [one.records for one in facts]
    distrusted = [(entry["after"], entry["before_generation"]) for entry in distrusted_entries(records)]
    job_start = max((one.job_start for one in records if one.job_start is not None), default=None)
    unusable: dict[Place, Exception] = {}
    for offer in (offer for one in facts for offer in one.offers):
        if offer.fault or offer.manifest is None:
            continue
        place = offer.reader, offer.store, offer.step
        if is_distrusted(offer.manifest, distrusted):
            unusable[place] = CorruptSnapshot(DIFFERED)
        elif is_restart and job_start is not None and offer.step > job_start:
            changes = changed_settings(offer.manifest, facts[0].config)
            changes += ["data"] if offer.manifest.data.sha256 != facts[0].data else []
            if changes:
                unusable[place] = UnreadableSnapshot(f"it is not of this job ({'; '.join(changes)})")
    return unusable


def check_lost(
    facts: Sequence[StartFacts], found: Found, is_restart: bool, run: str | None
) -> Refusal | None:
    """Return a Refusal if the run has, or may have, snapshots past step 0 but none is valid; else None.

    It may have some if a snapshot cannot be read or, in a restart, if `run`, the id in run.json, is None. If
    its snapshots are only corrupt or missing, there is no Refusal with trainer.eval_only or, in a job's first
    generation, with snapshot.resume=never.
    """
    config, reasons = facts[0].config, [str(offer) for offer in found.unreadable()]
    if found.choice and found.choice.step > 0:
        return None
    if is_restart and run is None:
        reasons.append("run.json is gone: the disk of run_dir may be away")
    if reasons:
        refusal = refuse(facts, is_restart, [], "unreadable", url=found.where, reasons=shorten(reasons))
        return replace(refusal, may_pass=True)
    completed = max((offer.step for offer in found.on_disk()), default=0)
    recorded = max(one.records.durable_step for one in facts)
    begins_anew = config.snapshot.resume == "never" and not is_restart
    if max(completed, recorded) == 0 or begins_anew or config.trainer.eval_only:
        return None
    reasons = [str(offer) for offer in found.on_disk() if offer.fault]
    if recorded > completed:
        reasons.append(f"run.json tells of one of step {recorded}, which no node has")
    step, url = max(completed, recorded), found.where
    return refuse(facts, is_restart, [], "lost", url=url, reasons=shorten(reasons), step=step)


def check_choice(
    facts: Sequence[StartFacts],
    found: Found,
    is_restart: bool,
    run: str | None,
    changes: list[str],
    dtype: str,
) -> Refusal | None:
    """Return a Refusal if the run must not go on from the snapshot found, or begin without one; else None.

    `run` is the id of the run on record; None if there is none. `changes` are the settings that differ from
    the snapshot's and matter, and `dtype` is that of matrix products. In a restart from a snapshot only data
    and hardware are checked.
    """
    config, choice, is_first = facts[0].config, found.choice, not is_restart
    resume, only_evaluates = config.snapshot.resume, config.trainer.eval_only
    values: dict[str, Any] = {"url": found.where, "changes": "; ".join(changes), "run_dir": config.run_dir}
    values |= {"path": config.data.path, "host": facts[0].host}
    if choice is None or choice.manifest is None:
        is_elsewhere = any(one.tokenizer for one in facts) and not facts[0].tokenizer
        reasons = {
            "nothing to resume": resume == "must" and is_first,
            "nothing to evaluate": only_evaluates,
            "tokenizer": is_elsewhere and config.data.tokenizer == "auto",
        }
    else:
        manifest, then = choice.manifest, choice.manifest.software
        is_over = only_evaluates or manifest.step >= config.trainer.max_steps
        is_other = (then.device_type, then.dtype) != (facts[0].device, dtype)
        takes_weights = any(change.startswith("snapshot.init_from:") for change in changes)
        reasons = {
            "resume=never": resume == "never" and is_first,
            "other data": manifest.data.sha256 != facts[0].data,
            "other run": is_first and bool(run) and manifest.run not in (None, run) and not only_evaluates,
            "init_from": takes_weights and config.snapshot.init_from is not None,
            "other model": any(change.startswith(OTHER_MODEL) for change in changes),
            "other settings": bool(changes) and resume != "changed",
            "other hardware": is_other and not is_over and not (resume == "changed" and is_first),
        }
        values |= {"step": choice.step, "run": manifest.run, "recorded": run}
        values |= {"then": f"{then.device_type} in {then.dtype}", "now": f"{facts[0].device} and {dtype}"}
    kind = next((kind for kind, holds in reasons.items() if holds), None)
    return refuse(facts, is_restart, [], kind, **values) if kind else None


def shorten(reasons: list[str]) -> str:
    """Return the first three of `reasons` in one line; equal ones among these three appear once."""
    return "; ".join(dict.fromkeys(reasons[:3]))


def skipped_snapshots(found: Found, config: Config) -> list[str]:
    """Return a line for each snapshot on disk, and each folder, that cannot be read or is not of this job.

    With trainer.eval_only, which renames no snapshot, also a line for each corrupt one.
    """
    skipped = found.on_disk() if config.trainer.eval_only else found.unreadable()
    lines = {(offer.step, offer.where, offer.fault) for offer in skipped if offer.fault}
    return [
        fault if step < 0 else f"snapshot of step {step} in {where} skipped: {fault}"
        for step, where, fault in sorted(lines, reverse=True)
    ]
