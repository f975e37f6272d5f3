from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshots import make_manifest, snapshot_of
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model
from support.vocabularies import cl100k_like

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig, SnapshotConfig, to_dict
from mingpt.data import CharTokenizer, Corpus
from mingpt.data.corpus import open_data
from mingpt.snapshot import Manifest, Snapshot
from mingpt.snapshot.layout import TensorSpec
from mingpt.training.contents import check_model, describe_tokenizer, make_tokenizer
from mingpt.training.run import match_weights
from mingpt.training.run_data import load_corpus

VOCABULARY = "abcdefghijk"
CHARACTERS = CharTokenizer(VOCABULARY).to_bytes()
MODEL = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=16)


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
    for missing in entries:
        rest = {key: entry for key, entry in entries.items() if key != missing}
        with pytest.raises(CorruptSnapshot, match=f"lacks {missing}"):
            check_model(manifest, rest, CHARACTERS)
    for key, entry in entries.items():
        for other in (replace(entry, shape=(*entry.shape, 1)), replace(entry, dtype=torch.int32)):
            with pytest.raises(CorruptSnapshot, match=key):
                check_model(manifest, entries | {key: other}, CHARACTERS)
    for more in ("model.more", "optimizer.more.step", "optimizer.wte.weight.code", "other"):
        with pytest.raises(CorruptSnapshot, match=f"{more}.*which its model lacks"):
            check_model(manifest, entries | {more: entries["model.wte.weight"]}, CHARACTERS)


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
    ("content", "more", "reason"),
    [
        (bytes(range(7)), {}, r"this is not a tokenizer\.json"),
        (cl100k_like("ab", 257), {"sha256": "0" * 64}, "its bytes are not those that the manifest tells of"),
        (cl100k_like("ab", 257), {"vocab_size": 1}, r"it has 257 tokens, and the model 1"),
        (None, {}, "its bytes are not those"),
        (b"ba", {"kind": "char"}, r"this is not a tokenizer\.json of characters"),
        (b"", {"kind": "unknown"}, "there is no tokenizer 'unknown'"),
    ],
)
def test_a_tokenizer_that_a_snapshot_carries_and_that_is_none_or_another_is_one_sentence(
    content: bytes | None, more: dict[str, Any], reason: str
) -> None:
    manifest = make_manifest(3, tokenizer={"kind": "json", "vocab_size": 11, **more})
    with pytest.raises(UserError, match=f"the tokenizer of the snapshot cannot be used: {reason}"):
        make_tokenizer(manifest, content)


def make_initial(
    tensors: dict[str, torch.Tensor], tokenizer: CharTokenizer | None, model: ModelConfig = MODEL
) -> Snapshot:
    """The snapshot of snapshot.init_from, with the weights `tensors`."""
    about = describe_tokenizer(tokenizer, len(tensors["wte.weight"]))
    manifest = make_manifest(3, config=to_dict(Config(model=model)), tokenizer=about)
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return snapshot_of(manifest, named, tokenizer.to_bytes() if tokenizer else None)


def test_weights_to_start_with_are_fitted_and_those_of_another_model_or_tokenizer_are_refused() -> None:
    """Positions are cut, and all other weights are unchanged."""
    model, _ = make_model("adamw", "gpt2")
    config = Config(model=MODEL, snapshot=SnapshotConfig(init_from="there"))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    given["wpe.weight"] = torch.randn(20, 16)
    characters = CharTokenizer(VOCABULARY)
    other = make_initial(given, None, replace(MODEL, n_layer=5, n_head=4))
    with pytest.raises(UserError, match=r"set model\.n_layer=5 model\.n_head=4"):
        match_weights(other, config, shapes, None)
    initial = make_initial(given, characters)
    with pytest.raises(UserError, match=r"init_from=there was trained with another tokenizer .* leave data"):
        match_weights(initial, config, shapes, CharTokenizer("abcdefghijz"))
    found = match_weights(initial, config, shapes, characters)
    assert {name: tuple(weight.shape) for name, weight in found.items()} == shapes
    assert torch.equal(found["wpe.weight"], given["wpe.weight"][:8])
    assert torch.equal(found["h.1.mlp.c_fc.weight"], given["h.1.mlp.c_fc.weight"])
    del given["ln_f.bias"]
    with pytest.raises(UserError, match=r"init_from=there holds .* another model \(ln_f\.bias: missing"):
        match_weights(make_initial(given, None), config, shapes, None)
    given["wpe.weight"] = torch.randn(5, 16)
    with pytest.raises(UserError, match=r"=there holds 5 positions .* 8: set data\.block_size=5, or less"):
        match_weights(make_initial(given, None), config, shapes, None)


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
