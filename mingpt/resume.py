"""What a generation starts from: found, agreed by all ranks, checked against the configuration, loaded."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.config import Config, check_workers, differences, to_dict
from mingpt.data import Corpus, Tokenizer, load_tokenizer
from mingpt.distributed import DistributedContext
from mingpt.errors import UserError
from mingpt.model import GPT, from_gpt2
from mingpt.report import read_run_id
from mingpt.snapshot import MemorySnapshots, Snapshot, SnapshotStore, open_snapshot, this_process

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatestSnapshot:
    """The newest valid snapshot that any rank can see, and what this rank found to be corrupt."""

    snapshot: Snapshot | None
    durable_step: int  # of the newest one that is not in memory only
    corrupt: dict[int, str]  # step -> reason
    where: str


@dataclass(frozen=True)
class StartPoint:
    """What this generation starts from, the same on all ranks."""

    run_id: str
    is_restart: bool  # false in a job's first generation
    store: SnapshotStore
    memory: MemorySnapshots
    snapshot: Snapshot | None
    durable_step: int
    changes: list[str]  # settings that differ from the snapshot's on purpose


def find_start(config: Config, context: DistributedContext, run_dir: Path, corpus: Corpus) -> StartPoint:
    """Find the newest snapshot and check that the run can go on from it. Raises UserError. Collective."""
    store = context.raise_on_all_ranks(lambda: open_store(config, context))
    is_restart = context.is_restart()
    if not is_restart:
        check_workers(config, context.world_size)
    run_ids = context.all_gather_object(read_run_id(run_dir))
    known_ids = [run_id for run_id in run_ids if run_id]
    run_id = known_ids[0] if known_ids else context.new_run_id()
    agent = this_process(context.launch.agent_pid)
    memory = MemorySnapshots(config.snapshot.memory_path, run_id, run_dir, context.launch.node_rank, agent)
    latest = find_latest(store, memory, context, is_restart)
    changes = check_snapshot(latest.snapshot, config, latest.where, corpus, is_restart)
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, latest, is_restart)
    return StartPoint(run_id, is_restart, store, memory, latest.snapshot, latest.durable_step, changes)


def open_store(config: Config, context: DistributedContext) -> SnapshotStore:
    """The snapshots of this run. Raises UserError if they could not bring back a worker that died."""
    store = SnapshotStore(config.snapshot.path or str(Path(config.run_dir) / "snapshots"))
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def find_latest(
    store: SnapshotStore, memory: MemorySnapshots, context: DistributedContext, is_restart: bool
) -> LatestSnapshot:
    """Find the newest valid snapshot and hand it to all ranks. One worker per node reads the store.

    In a job's first generation, one in memory counts only if no snapshot on disk before it is missing: a user
    who deletes snapshots wants to go back. In a restart, they may have been lost with their node.
    """
    reads_store = context.launch.local_rank == 0
    found, corrupt = context.run_with_heartbeat(lambda: store.find_newest() if reads_store else (None, {}))
    step = found.manifest["step"] if found else -1
    views = context.all_gather_object((step, max(corrupt, default=-1)))
    saved_after = None if is_restart else max(0, *(step for view in views for step in view))
    in_memory = context.run_with_heartbeat(
        lambda: memory.find_newest(newer_than=step, saved_after=saved_after) if reads_store else None
    )
    found = in_memory or found
    durable_step = max(0, *(valid for valid, _ in views))
    steps = context.all_gather_object(found.manifest["step"] if found else -1)
    if max(steps) < 0:
        return LatestSnapshot(None, durable_step, corrupt, store.url)
    source = steps.index(max(steps))
    found = found if context.rank == source else None
    manifest = context.broadcast_object(found.manifest if found else None, source)
    content = context.broadcast_bytes(found.content if found else None, source)
    where = store.url if manifest["step"] == durable_step else str(memory.root)
    return LatestSnapshot(Snapshot(manifest, content), durable_step, corrupt, where)


def prepare_store(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    latest: LatestSnapshot,
    is_restart: bool,
) -> None:
    """Quarantine corrupt snapshots and prepare the folder. Raises UserError if it cannot be written to."""

    def prepare() -> None:
        for step, reason in latest.corrupt.items():
            store.quarantine(step, reason)
        if context.launch.local_rank == 0:
            memory.remove_leftovers()
        if not is_restart and context.launch.local_rank == 0:
            memory.remove_newer(latest.snapshot.manifest["step"] if latest.snapshot else -1)
        if context.rank == 0:
            store.prepare()

    context.run_with_heartbeat(prepare)


def check_snapshot(
    snapshot: Snapshot | None, config: Config, url: str, corpus: Corpus, is_restart: bool
) -> list[str]:
    """Raises UserError unless a generation may start from this snapshot; a restart checks the data alone.

    Returns the settings that were changed on purpose.
    """
    resume = config.snapshot.resume
    if snapshot is None:
        if resume == "must" and not is_restart:
            raise UserError(
                f"there is no valid snapshot in {url} to resume from, and snapshot.resume=must needs one"
            )
        if config.trainer.eval_only:
            raise UserError(f"there is no valid snapshot in {url} to evaluate")
        return []
    manifest = snapshot.manifest
    step = manifest["step"]
    if resume == "never" and not is_restart:
        raise UserError(
            f"{url} holds a snapshot of step {step}, and snapshot.resume=never refuses one: "
            "choose another run_dir"
        )
    trained_on = manifest["data"]["sha256"]
    if trained_on != corpus.fingerprint:
        raise UserError(
            f"{config.data.path} (sha256 {corpus.fingerprint[:12]}...) is not the text that the snapshots in "
            f"{url} were trained on ({trained_on[:12]}...): choose another run_dir, with snapshot.init_from "
            "to keep the weights"
        )
    if snapshot_tokenizer(snapshot).fingerprint() != corpus.tokenizer.fingerprint():
        raise UserError(f"{url} holds snapshots of a run with another tokenizer: choose another run_dir")
    if is_restart:
        return []
    changes = differences(manifest["config"], to_dict(config))
    if config.snapshot.init_from and any(change.startswith("snapshot.init_from:") for change in changes):
        raise UserError(
            f"snapshot.init_from starts a fresh run and {url} holds a snapshot of step {step}: "
            "choose another run_dir"
        )
    if changes and resume != "changed":
        raise UserError(
            f"{url} holds snapshots of a run with other settings ({'; '.join(changes)}): set them back, "
            "choose another run_dir, or go on with the new ones by snapshot.resume=changed"
        )
    return changes


def check_environment(start: StartPoint, config: Config, environment: dict[str, Any]) -> None:
    """Raises UserError if the snapshot was computed on another kind of device or in another dtype.

    A person who starts a job may ask for that by snapshot.resume=changed; a restart never does.
    """
    assert start.snapshot
    then = start.snapshot.manifest["software"]
    was = {device_type_of(then), then["dtype"]}
    now = {environment["device_type"], environment["dtype"]}
    is_asked_for = config.snapshot.resume == "changed" and not start.is_restart
    if was == now or is_asked_for or config.trainer.eval_only:
        return
    raise UserError(
        f"the snapshots in {start.store.url} were computed on {device_type_of(then)} in {then['dtype']} and "
        f"the workers now have {environment['device_type']} and {environment['dtype']}: start the job on "
        "such hardware again, or go on with this one by snapshot.resume=changed"
    )


def device_type_of(software: dict[str, Any]) -> str:
    """The kind of device that a snapshot was computed on."""
    kind = software["device"].split()[0]  # schema 1 began without device_type
    return str(software.get("device_type") or (kind if kind in ("cpu", "mps") else "cuda"))


def compare_environment(then: dict[str, Any], now: dict[str, Any]) -> None:
    """One line on what besides the configuration could change the bits."""
    changed = [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]
    if changed:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written "
            "with other software or hardware (%s)",
            "; ".join(changed),
        )


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy every weight. Raises UserError if they are another model's."""
    parameters = dict(model.named_parameters())
    wrong = []
    for name, parameter in parameters.items():
        there = tuple(tensors[name].shape) if name in tensors else "missing"
        if there != tuple(parameter.shape):
            wrong.append(f"{name}: {there} -> {tuple(parameter.shape)}")
    surplus = tensors.keys() - parameters.keys()
    if wrong or surplus:
        reasons = wrong[:3] + ([f"{len(surplus)} tensors that this model lacks"] if surplus else [])
        raise UserError(f"{origin} holds the weights of another model ({'; '.join(reasons)})")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def init_from(model: GPT, where: str, tokenizer: Tokenizer) -> None:
    """Start with the weights of another run, of one of its snapshots, or of a GPT-2 safetensors file.

    Embedding rows follow their tokens: a token that both tokenizers have takes over its row, a new one keeps
    its fresh row. Learned positions are cut to block_size. Raises UserError if anything else differs.
    """
    other: Tokenizer | None = None
    try:
        snapshot = open_snapshot(where)
        tensors, other = snapshot.tensors("model."), snapshot_tokenizer(snapshot)
    except UserError:
        if not where.endswith(".safetensors"):
            raise
        tensors = from_gpt2(read_safetensors(where))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in ("wte.weight", "lm_head.weight"):
        if name in parameters and name in tensors and tensors[name].shape[1:] == parameters[name].shape[1:]:
            tensors[name] = match_rows(name, parameters[name], tensors[name], tokenizer, other, where)
    if "wpe.weight" in parameters and "wpe.weight" in tensors:
        tensors["wpe.weight"] = tensors["wpe.weight"][: model.block_size]
    load_weights(model, tensors, f"snapshot.init_from={where}")
    log.info("weights taken from %s", where)


def match_rows(
    name: str, fresh: Tensor, theirs: Tensor, tokenizer: Tokenizer, other: Tokenizer | None, where: str
) -> Tensor:
    """(V, C) rows for this vocabulary from those of another one."""
    if other is None and theirs.shape == fresh.shape:
        return theirs
    if other is None:
        log.info("%s has another vocabulary: %s begins afresh", where, name)
        return fresh
    rows = fresh.clone()
    for token, their_token in tokenizer.matching_tokens(other).items():
        rows[token] = theirs[their_token]
    return rows


def snapshot_tokenizer(snapshot: Snapshot) -> Tokenizer:
    """The tokenizer that a snapshot carries."""
    name = snapshot.manifest["config"]["data"].get("tokenizer", "auto")
    return load_tokenizer(name, snapshot.manifest["vocabulary"].encode())


def read_safetensors(where: str) -> dict[str, Tensor]:
    """The tensors of a file at a path or URL. Raises UserError."""
    import fsspec
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        with fsspec.open(where, "rb") as file:
            return load(file.read())
    except (OSError, ImportError, ValueError, SafetensorError) as error:
        raise UserError(f"snapshot.init_from={where} cannot be read: {error}") from None
