"""What a run goes on from: agreed by all workers, checked against what it is asked to be."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.cluster import Cluster
from mingpt.config import Config, UserError, differences, to_dict
from mingpt.data import Vocabulary
from mingpt.memory import Memory
from mingpt.model import GPT
from mingpt.snapshot import Folder, Snapshot, open_anywhere

log = logging.getLogger(__name__)


def open_folder(config: Config, cluster: Cluster) -> Folder:
    """The snapshots of this run. Raises UserError if they could not bring back a worker that died, or cannot be written."""
    folder = Folder(config.snapshot.path or str(Path(config.run_dir) / "snapshots"))
    if folder.private and cluster.launch.master:
        raise UserError(
            f"snapshot.path {folder.url} lives in the memory of one process and cannot bring back workers that died: use a folder or an object store"
        )
    return folder


@dataclass(frozen=True)
class Found:
    """The newest valid snapshot that any worker can see, the step of the newest durable one, and what is wrong with those seen from here."""

    newest: Snapshot | None
    durable: int
    wrong: dict[int, str]
    where: str


def look(folder: Folder, memory: Memory, cluster: Cluster, restart: bool) -> Found:
    """Find the newest valid snapshot and hand it to all workers. One worker a node looks.

    When somebody starts a job, what lies in memory counts only if no durable snapshot before it is missing: whoever deletes
    snapshots wants to go back. Within a job they may have gone with their node.
    """
    first = cluster.launch.local_rank == 0
    mine, wrong = cluster.in_turns(lambda: folder.newest() if first else (None, {}))
    step = mine.manifest["step"] if mine else -1
    views = cluster.gather((step, max(wrong, default=-1)))
    beside = None if restart else max(0, *(step for view in views for step in view))
    mine = cluster.in_turns(lambda: memory.newest(newer_than=step, beside=beside) if first else None) or mine
    durable = max(0, *(valid for valid, _ in views))
    seen = cluster.gather(mine.manifest["step"] if mine else -1)
    if max(seen) < 0:
        return Found(None, durable, wrong, folder.url)
    source = seen.index(max(seen))
    mine = mine if cluster.rank == source else None
    manifest = cluster.broadcast(mine.manifest if mine else None, source)
    where = folder.url if manifest["step"] == durable else str(memory.root)
    return Found(Snapshot(manifest, cluster.share(mine.content if mine else None, source)), durable, wrong, where)


def take_over(folder: Folder, memory: Memory, cluster: Cluster, found: Found, restart: bool) -> None:
    """From here on the run is this job's: damaged snapshots are set aside, and it must be possible to write. Raises UserError."""

    def claim() -> None:
        for step, reason in found.wrong.items():
            folder.set_aside(step, reason)
        if not restart and cluster.launch.local_rank == 0:
            memory.drop_newer(found.newest.manifest["step"] if found.newest else -1)
        if cluster.rank == 0:
            folder.prepare()

    cluster.in_turns(claim)


def check(snapshot: Snapshot | None, config: Config, url: str, fingerprint: str, restart: bool) -> list[str]:
    """Whether a generation may begin with this snapshot; a `restart`, after a job's first, may in all but the text.

    Returns the settings changed on purpose; raises UserError.
    """
    resume = config.snapshot.resume
    if snapshot is None:
        if resume == "must" and not restart:
            raise UserError(f"there is no valid snapshot in {url} to resume from, and snapshot.resume=must needs one")
        if config.trainer.eval_only:
            raise UserError(f"there is no valid snapshot in {url} to evaluate")
        return []
    manifest = snapshot.manifest
    if resume == "never" and not restart:
        raise UserError(f"{url} holds a snapshot of step {manifest['step']}, and snapshot.resume=never wants none: choose another run_dir")
    if manifest["data"]["sha256"] != fingerprint:
        raise UserError(
            f"{config.data.path} (sha256 {fingerprint[:12]}...) is not the text that the snapshots in {url} were trained on "
            f"({manifest['data']['sha256'][:12]}...): choose another run_dir, with snapshot.init_from to keep the weights"
        )
    if restart:
        return []
    changes = differences(manifest["config"], to_dict(config))
    if config.snapshot.init_from and any(change.startswith("snapshot.init_from:") for change in changes):
        raise UserError(f"snapshot.init_from starts a fresh run and {url} holds a snapshot of step {manifest['step']}: choose another run_dir")
    if changes and resume != "changed":
        raise UserError(
            f"{url} holds snapshots of a run with other settings ({'; '.join(changes)}): "
            "set them back, choose another run_dir, or go on with the new ones by snapshot.resume=changed"
        )
    return changes


def compare_software(then: dict[str, Any], now: dict[str, Any]) -> None:
    """One line on what else than the configuration could change the bits."""
    if changed := [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written with other software or hardware (%s)",
            "; ".join(changed),
        )


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Take every weight. Raises UserError if they are another model's."""
    mine = dict(model.named_parameters())
    wrong = [
        f"{name}: {tuple(tensors[name].shape) if name in tensors else 'missing'} -> {tuple(weight.shape)}"
        for name, weight in mine.items()
        if name not in tensors or tensors[name].shape != weight.shape
    ]
    if wrong or tensors.keys() - mine.keys():
        more = f"{len(tensors.keys() - mine.keys())} tensors that this model lacks" if tensors.keys() - mine.keys() else ""
        raise UserError(f"{origin} holds the weights of another model ({'; '.join([*wrong[:3], *filter(None, [more])])})")
    with torch.no_grad():
        for name, weight in mine.items():
            weight.copy_(tensors[name])


def from_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's GPT-2 tensors under this project's names; its Conv1D matrices are (in, out), ours (out, in)."""
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    return {
        name: tensor.t().contiguous() if name.endswith(turned) else tensor
        for name, tensor in named.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and name != "lm_head.weight"
    }


def init_from(model: GPT, where: str, vocabulary: Vocabulary) -> None:
    """Begin with the weights of another run, of one of its snapshots, or of a GPT-2 safetensors file.

    Rows that belong to a character go to the same character of this vocabulary; a new character keeps its fresh row, and so do
    all of them where the other vocabulary is not of characters. Learned positions are cut to block_size. Raises UserError if
    anything else differs.
    """
    theirs: Vocabulary | None = None
    try:
        snapshot = open_anywhere(where)
        tensors, theirs = snapshot.part("model."), Vocabulary(snapshot.manifest["vocabulary"])
    except UserError:
        if not where.endswith(".safetensors"):
            raise
        tensors = from_gpt2(read_safetensors(where))
    mine = {name: weight.detach() for name, weight in model.named_parameters()}
    for name in ("wte.weight", "lm_head.weight"):
        if name not in mine or name not in tensors or tensors[name].shape[1:] != mine[name].shape[1:]:
            continue
        if theirs is None and tensors[name].shape != mine[name].shape:
            log.info("%s has tokens that are not characters: %s begins afresh", where, name)
        rows = mine[name].clone()
        for token, character in enumerate(vocabulary.characters if theirs else ""):
            if theirs and character in theirs.characters:
                rows[token] = tensors[name][theirs.characters.index(character)]
        tensors[name] = tensors[name] if theirs is None and tensors[name].shape == rows.shape else rows
    if "wpe.weight" in mine and "wpe.weight" in tensors:
        tensors["wpe.weight"] = tensors["wpe.weight"][: model.block_size]
    load_weights(model, tensors, f"snapshot.init_from={where}")
    log.info("weights taken from %s", where)


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
