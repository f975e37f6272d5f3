from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden import Golden
from support.snapshots import make_manifest, snapshot_of
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model
from support.vocabularies import cl100k_like

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig, SnapshotConfig, to_dict
from mingpt.data import CharTokenizer, Corpus
from mingpt.data.corpus import open_data
from mingpt.model import parameter_shapes
from mingpt.snapshot import Manifest, Snapshot
from mingpt.snapshot.layout import TensorSpec
from mingpt.training.contents import check_model, describe_tokenizer, make_tokenizer
from mingpt.training.run import match_weights
from mingpt.training.run_data import load_corpus

VOCABULARY = "abcdefghijk"
CHARACTERS = CharTokenizer(VOCABULARY).to_bytes()


def make_snapshot(name: Name, arch: Arch) -> tuple[Manifest, dict[str, TensorSpec]]:
    """The manifest of a run, and the types and shapes in its file."""
    model, optimizer = make_model(name, arch)
    config = Config(
        data=DataConfig(block_size=8),
        model=ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=16),
        optimizer=OptimizerConfig(name=name),
    )
    tensors = {f"model.{key}": weight.detach() for key, weight in model.named_parameters()}
    tensors |= {f"optimizer.{key}": tensor for key, tensor in optimizer.state_dict().items()}
    about = describe_tokenizer(CharTokenizer(VOCABULARY), len(VOCABULARY))
    manifest = make_manifest(3, config=to_dict(config), tokenizer=about)
    return manifest, snapshot_of(manifest, tensors).entries


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tensors_of_a_run_are_those_that_its_manifest_describes(name: Name, arch: Arch) -> None:
    manifest, entries = make_snapshot(name, arch)
    check_model(manifest, entries, CHARACTERS)
    wrong = []
    for key, entry in entries.items():
        wrong.append((f"lacks {key}", {name: entries[name] for name in entries if name != key}))
        for other in (replace(entry, shape=(*entry.shape, 1)), replace(entry, dtype=torch.int32)):
            wrong.append((f"{key} has", entries | {key: other}))
    for more in ("model.more", "optimizer.more.step", "optimizer.wte.weight.code", "other"):
        wrong.append((f"holds '{more}', which", entries | {more: entries["model.wte.weight"]}))
    for sentence, changed in wrong:
        with pytest.raises(CorruptSnapshot, match=sentence):
            check_model(manifest, changed, CHARACTERS)


@pytest.mark.parametrize(
    ("change", "vocab_size"),
    [
        ({"n_layer": 3}, 11),
        ({"n_layer": 10**9}, 11),
        ({"n_embd": 10**12}, 11),
        ({"arch": "gpt2"}, 11),
        ({}, 3),
        ({}, 2_000_000),
    ],
)
def test_a_configuration_or_a_vocabulary_of_another_model_is_refused_whatever_its_size(
    change: dict[str, Any], vocab_size: int
) -> None:
    """The snapshot is refused at once, and nothing is allocated for it."""
    manifest, entries = make_snapshot("muon", "modern")
    config = manifest.config | {"model": manifest.config["model"] | change}
    other = make_manifest(3, config=config, tokenizer={"kind": "char", "vocab_size": vocab_size})
    with pytest.raises(CorruptSnapshot):
        check_model(other, entries, CHARACTERS)


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (bytes(range(7)), {}),
        (cl100k_like("ab", 257), {"sha256": "0" * 64}),
        (cl100k_like("ab", 257), {"vocab_size": 1}),
        (None, {}),
        (b"ba", {"kind": "char"}),
        (b"", {"kind": "unknown"}),
    ],
    ids=["no tokenizer", "other bytes", "too large", "none", "no characters", "of no kind"],
)
def test_a_tokenizer_that_a_snapshot_carries_and_that_cannot_be_used_is_one_sentence(
    content: bytes | None, more: dict[str, Any], golden: Golden
) -> None:
    manifest = make_manifest(3, tokenizer={"kind": "json", "vocab_size": 11, **more})
    with pytest.raises(UserError) as error:
        make_tokenizer(manifest, content)
    golden(str(error.value).partition(": Exception")[0])  # what follows is of the package tokenizers


MODEL = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=16)
CONFIG = Config(model=MODEL, snapshot=SnapshotConfig(init_from="there"))
SHAPES = parameter_shapes(MODEL, vocab_size=11, block_size=8)
WEIGHTS = {name: torch.randn(shape) for name, shape in (SHAPES | {"wpe.weight": (20, 16)}).items()}
TOKENIZER, OTHER = CharTokenizer(VOCABULARY), CharTokenizer("abcdefghijz")


def make_initial(
    tensors: dict[str, torch.Tensor], tokenizer: CharTokenizer | None, model: ModelConfig = MODEL
) -> Snapshot:
    """The snapshot of snapshot.init_from, with the weights `tensors`."""
    about = describe_tokenizer(tokenizer, len(tensors["wte.weight"]))
    manifest = make_manifest(3, config=to_dict(Config(model=model)), tokenizer=about)
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return snapshot_of(manifest, named, tokenizer.to_bytes() if tokenizer else None)


def test_weights_to_start_with_are_fitted() -> None:
    """Positions are cut, and all other weights are unchanged."""
    found = match_weights(make_initial(WEIGHTS, TOKENIZER), CONFIG, SHAPES, TOKENIZER)
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(weight, WEIGHTS[name][: SHAPES[name][0]]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("model", "tokenizer", "changes"),
    [
        (replace(MODEL, n_layer=5, n_head=4), None, {}),
        (MODEL, OTHER, {}),
        (MODEL, None, {"ln_f.bias": torch.zeros(1)}),
        (MODEL, None, {"wpe.weight": torch.zeros(5, 16)}),
    ],
    ids=["model", "tokenizer", "shape", "positions"],
)
def test_weights_to_start_with_of_another_model_or_tokenizer_are_one_sentence(
    model: ModelConfig, tokenizer: CharTokenizer | None, changes: dict[str, torch.Tensor], golden: Golden
) -> None:
    initial = make_initial(WEIGHTS | changes, tokenizer, model)
    with pytest.raises(UserError) as error:
        match_weights(initial, CONFIG, SHAPES, TOKENIZER)
    golden(str(error.value))


def load(path: Path, initial: Snapshot, **data: Any) -> Corpus:
    config = Config(
        data=DataConfig(path=str(path), block_size=4, **data), snapshot=SnapshotConfig(init_from="there")
    )
    origin = initial.manifest, initial.read_tokenizer()
    return load_corpus(config, open_data(config.data), None, False, origin, None, is_told=False)


@pytest.mark.parametrize(("rows", "vocab_size", "expected"), [(9, None, 9), (9, 8, 8)])
def test_a_text_is_encoded_with_the_tokenizer_of_the_weights_and_the_embedding_keeps_its_rows(
    rows: int, vocab_size: int | None, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the sea " * 50)
    weights, characters = {"wte.weight": torch.zeros(rows, 4)}, CharTokenizer(" aehstz")
    corpus = load(tmp_path / "text.txt", make_initial(weights, characters), vocab_size=vocab_size)
    assert corpus.tokenizer and corpus.tokenizer.fingerprint() == characters.fingerprint()
    assert corpus.vocab_size == expected
    with pytest.raises(UserError, match=r"have no tokenizer that can be read: name it by data\."):
        load(tmp_path / "text.txt", make_initial(weights, None))
    # `match_weights` refuses weights with fewer rows than the tokenizer has tokens.
    few = make_initial({"wte.weight": torch.zeros(5, 4)}, None)
    assert load(tmp_path / "text.txt", few, tokenizer="char").vocab_size == 6
