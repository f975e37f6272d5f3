"""What a function cannot do is refused in one sentence; one row per mistake."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from support.golden import Golden
from support.models import CONFIG, make_model, make_tokens
from support.shards import write_llmc
from support.snapshots import make_manifest, make_store, open_content, snapshot_of, write
from support.vocabularies import gpt2
from torch.utils.data import TensorDataset

from mingpt import parallel
from mingpt.base import events
from mingpt.base.files import MAX_JSON_BYTES, read_json, temporary_folder
from mingpt.base.paths import refuse_pipe
from mingpt.base.urls import open_url
from mingpt.config import Config, ModelConfig, to_dict
from mingpt.data import CharTokenizer, ElasticSampler, load_named_tokenizer, load_tokenizer
from mingpt.data.shards import open_shards
from mingpt.data.windows import WindowDataset
from mingpt.distributed import Launch
from mingpt.distributed.device import find_device
from mingpt.model import parameter_shapes
from mingpt.model.operations import PositionTables
from mingpt.snapshot import Manifest, open_snapshot
from mingpt.snapshot.manifest import FileRecord, check_files, encode_manifest
from mingpt.snapshot.reading import read_range
from mingpt.training.contents import check_model, make_tokenizer, tensor_shapes

LETTERS = CharTokenizer("abc").to_bytes()


def written(path: Path, content: bytes = b"content", size: int | None = None) -> Path:
    """The path of a new file with this content, followed by zeros up to `size`."""
    path.write_bytes(content)
    os.truncate(path, size or len(content))
    return path


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


def damaged_snapshot(folder: Path) -> Path:
    """The path of the weights of step 3, which are damaged; there is no other snapshot in their folder."""
    store = make_store(folder)
    write(store, make_manifest(3))
    return written(Path(store.root) / "step_00000003.safetensors")


def shards(folder: Path) -> Any:
    write_llmc(folder / "a.bin", range(1000))
    return open_shards(folder, 0.1).train


def of_run(vocab_size: int = 3, kind: str = "char", layers: int = 1, **fields: Any) -> Manifest:
    config = to_dict(Config(model=ModelConfig(n_layer=layers, n_head=1, n_embd=2)))
    tokenizer = {"kind": kind, "vocab_size": vocab_size}
    return make_manifest(1, **({"config": config, "tokenizer": tokenizer} | fields))


def check(manifest: Manifest, tokenizer: bytes | None = None, is_whole: bool = False) -> None:
    """Check a snapshot that has one tensor, or with `is_whole` all those of its model."""
    shapes = tensor_shapes(manifest.settings, 3) if is_whole else {"model.wte.weight": (3, 2)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    check_model(manifest, snapshot_of(manifest, tensors).entries, tokenizer)


def with_large_tokenizer() -> Manifest:
    kinds = ("safetensors", "optimizer.safetensors", "tokenizer")
    names = [f"step_00000001.{kind}" for kind in kinds]
    return make_manifest(1).with_files(
        [FileRecord(name=name, sha256="ab" * 32, bytes=10**9) for name in names]
    )


# {mistake: what is refused in a temporary folder}
REFUSED: dict[str, Callable[[Path], object]] = {
    "an event that is none": lambda folder: events.subscribe("nothing", print),
    "a long JSON": lambda folder: read_json(written(folder / "a.json", size=MAX_JSON_BYTES + 1)),
    "a named pipe": lambda folder: refuse_pipe(pipe(folder / "pipe"), "data.path"),
    "no room for temporary files": lambda folder: temporary_folder(f"{folder}/missing/"),
    "a URL of no driver": lambda folder: open_url("nowhere://place", "run_dir"),
    "a lone surrogate": lambda folder: gpt2().encode("\ud800"),
    "no tokenizer.json": lambda folder: load_named_tokenizer(str(written(folder / "a.json"))),
    "a kind of tokenizer": lambda folder: load_tokenizer("letters", b""),
    "a character": lambda folder: CharTokenizer("abc").encode("abd"),
    "no shards": lambda folder: open_shards(folder, 0.1),
    "a folder as a shard": lambda folder: open_shards(Path(pipe(folder / "a.bin")).parent, 0.1),
    "a token of other shards": lambda folder: WindowDataset(shards(folder), 8, 500).read([0, 495], 8),
    "no samples": lambda folder: ElasticSampler(
        TensorDataset(torch.arange(0)), batch_size=4, micro_batch_size=2, seed=1
    ),
    "a Mac's GPU for two": lambda folder: find_device("mps", Launch(world_size=2)),
    "a long text": lambda folder: make_model("gpt2", block_size=8)(make_tokens(length=9)),
    "a model that is too large": lambda folder: parameter_shapes(CONFIG, vocab_size=2**62, block_size=8),
    "an odd rotary size": lambda folder: PositionTables(8, 3),
    "a name of no extra": lambda folder: parallel.Nothing,
    "a long manifest": lambda folder: encode_manifest(make_manifest(1, run="0" * 32, more="x" * 5 * 10**6)),
    "a large tokenizer": lambda folder: check_files(with_large_tokenizer()),
    "a file that was cut": lambda folder: read_range(
        LocalFileSystem(), str(written(folder / "a")), 3, memoryview(bytearray(9))
    ),
    "a file without a header": lambda folder: open_content(b"short"),
    "a damaged file": lambda folder: open_snapshot(str(damaged_snapshot(folder))),
    "damaged snapshots": lambda folder: open_snapshot(str(damaged_snapshot(folder).parent)),
    "another program's snapshot": lambda folder: check(Manifest(step=1, windows=8)),
    "a manifest without data": lambda folder: check(Manifest(step=1, windows=8, config={})),
    "a deep model": lambda folder: check(of_run(layers=10**9)),
    "a large model": lambda folder: check(of_run(vocab_size=2**62)),
    "a tokenizer of none": lambda folder: check(of_run(kind="none"), LETTERS, is_whole=True),
    "a tokenizer for a smaller model": lambda folder: make_tokenizer(of_run(vocab_size=2), LETTERS),
    "a lost tokenizer": lambda folder: make_tokenizer(of_run(), None),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_done_is_one_sentence(mistake: str, tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(Exception) as error:
        REFUSED[mistake](tmp_path)
    golden(f"{type(error.value).__name__}: {error.value}")
