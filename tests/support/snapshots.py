"""Tensors, manifests and snapshots for tests."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from mingpt.distributed import DistributedContext
from mingpt.snapshot import (
    Check,
    Found,
    Manifest,
    Offer,
    Reader,
    Saver,
    Snapshot,
    Store,
    StoredState,
    Tier,
    find_valid,
)
from mingpt.snapshot.reading import SourceFile, StoredFile, TensorFile, accept_all
from mingpt.snapshot.search import choose
from support.forks import SingleProcess

TENSORS = {
    "model.wte": torch.arange(12.0).view(3, 4),
    "optimizer.wte.step": torch.tensor(1.0),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
}


def manifest_fields(step: int, loss: float | None = None) -> dict[str, Any]:
    """The manifest's fields that a caller sets before a save; `loss` is the validation loss at `step`."""
    return {
        "step": step,
        "windows": step * 8,
        "config": {},
        "tokenizer": {"kind": "none", "vocab_size": 2},
        "data": {"path": "data/input.txt", "sha256": "0" * 64},
        "software": {"torch": "2.13.0", "device": "cpu AVX512", "threads": 1, "dtype": "float32"},
        "metrics": {} if loss is None else {"val": {"step": step, "val/loss": loss}},
    }


def make_manifest(step: int, loss: float | None = None, **fields: Any) -> Manifest:
    return Manifest.model_validate(manifest_fields(step, loss) | fields)


def newest(store: Store) -> tuple[int, dict[int, str]]:
    """The step of the newest valid snapshot (-1: none), and {step: why a newer snapshot is corrupt}."""
    found, state = search([store], SingleProcess(), accept_all)
    return state.manifest.step if state else -1, found.corrupt(0)


def search(
    stores: Sequence[Store], context: DistributedContext, check: Check
) -> tuple[Found, StoredState | None]:
    """Search as a restart does, on each rank: the first of `stores` is on disk, the others are in memory."""
    reader = Reader(stores if context.launch.local_rank == 0 else [], check, context.rank)
    searches = list[Found]()

    def next_choice() -> Offer | None:
        offers = [offer for by_rank in context.gather_on_all(reader.offers) for offer in by_rank]
        choice = choose(offers, None)
        searches.append(Found(choice, stores[0].url, offers))
        return choice

    state = find_valid(reader, context, next_choice)
    return searches[-1], state


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})


def source_of(content: bytes) -> SourceFile:
    files = fsspec.filesystem("memory")
    path = f"/{uuid.uuid4().hex}"
    files.pipe_file(path, content)
    return SourceFile(files, path, "the file", ())


def open_content(content: bytes) -> TensorFile:
    return TensorFile(source_of(content))


def snapshot_of(
    manifest: Manifest, tensors: Mapping[str, Tensor], tokenizer: bytes | None = None
) -> Snapshot:
    files: list[StoredFile] = [open_content(to_safetensors(tensors))]
    if tokenizer is not None:
        files.append(StoredFile(source_of(tokenizer)))
    return Snapshot(manifest, files)


def make_store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "snapshots"), retries_s=(0.0, 0.0))
    store.prepare()
    return store


def write(
    store: Store, manifest: Manifest, tensors: Mapping[str, Tensor] = TENSORS, tokenizer: bytes | None = None
) -> None:
    saver = make_saver(store, keep=1_000_000, tokenizer=tokenizer)
    save(saver, manifest, tensors)
    (tier,) = saver.tiers
    if tier.error:
        raise tier.error


def make_saver(
    store: Store, keep: int = 100, keep_best: bool = False, tokenizer: bytes | None = None
) -> Saver:
    return Saver([Tier("disk", store, keep=keep, keep_best=keep_best)], tokenizer)


def save(saver: Saver, manifest: Manifest, tensors: Mapping[str, Tensor] = TENSORS) -> None:
    saver.save(manifest, tensors)
    saver.wait()


def file_names(store: Store) -> list[str]:
    return sorted(path.name for path in Path(store.root).iterdir())
