from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.snapshots import snapshot_of
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig, to_dict
from mingpt.data import CharTokenizer
from mingpt.snapshot.reading import TensorEntry
from mingpt.training.initial_weights import InitialWeights, match_rows, match_weights, open_weights
from mingpt.training.state import check_model, manifest_tokenizer, snapshot_tokenizer

VOCABULARY = "abcdefghijk"


def make_snapshot(name: Name, arch: Arch) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """What a manifest says of a run, and the tensors of its file."""
    model, optimizer = make_model(name, arch)
    config = Config(
        data=DataConfig(block_size=8),
        model=ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=16),
        optimizer=OptimizerConfig(name=name),
    )
    tensors = {f"model.{key}": weight.detach() for key, weight in model.named_parameters()}
    tensors |= {f"optimizer.{key}": tensor for key, tensor in optimizer.state_dict().items()}
    return {"config": to_dict(config), "vocabulary": VOCABULARY}, snapshot_of({}, tensors).entries


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tensors_of_a_run_are_those_that_its_manifest_describes(name: Name, arch: Arch) -> None:
    manifest, entries = make_snapshot(name, arch)
    check_model(manifest, entries)
    for missing in entries:
        rest = {key: entry for key, entry in entries.items() if key != missing}
        with pytest.raises(CorruptSnapshot, match=f"lacks {missing}"):
            check_model(manifest, rest)
    for key, entry in entries.items():
        for other in (replace(entry, shape=(*entry.shape, 1)), replace(entry, dtype="I32")):
            with pytest.raises(CorruptSnapshot, match=key):
                check_model(manifest, entries | {key: other})


def test_tensors_that_the_run_does_not_have_are_refused() -> None:
    manifest, entries = make_snapshot("muon", "modern")
    weight = entries["model.wte.weight"]
    for name in ("model.more", "optimizer.more.step", "optimizer.wte.weight.code", "other"):
        with pytest.raises(CorruptSnapshot, match=f"{name}.*which its model lacks"):
            check_model(manifest, entries | {name: weight})


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 3},
        {"n_layer": 10**9},
        {"n_embd": 10**12},
        {"arch": "gpt2"},
    ],
)
def test_a_configuration_of_another_model_is_refused_whatever_its_size(change: dict[str, Any]) -> None:
    """At once, and nothing is allocated for it."""
    manifest, entries = make_snapshot("muon", "modern")
    manifest["config"]["model"] |= change
    with pytest.raises(CorruptSnapshot):
        check_model(manifest, entries)


@pytest.mark.parametrize("vocabulary", ["", "ba", "aab", "abc", "a" * 2_000_000])
def test_a_vocabulary_that_is_none_or_has_another_size_is_refused(vocabulary: str) -> None:
    manifest, entries = make_snapshot("muon", "modern")
    with pytest.raises(CorruptSnapshot):
        check_model(manifest | {"vocabulary": vocabulary}, entries)


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95" + bytes(100), b"PK\x03\x04" + bytes(100)])
def test_a_gpt2_file_that_is_none_is_one_sentence(content: bytes, tmp_path: Any) -> None:
    path = tmp_path / "gpt2.safetensors"
    path.write_bytes(content)
    for where in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(UserError, match=f"snapshot.init_from={where} cannot be used"):
            open_weights(str(where))
    save_file({"wte.weight": torch.full((11, 16), float("nan"))}, path)
    with pytest.raises(UserError, match="not finite"):
        open_weights(str(path))


def json_snapshot(**fields: Any) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """That of a run with a tokenizer.json of 7 bytes and 11 tokens; `fields` go over its manifest."""
    manifest, entries = make_snapshot("adamw", "gpt2")
    about = {"kind": "json", "vocab_size": len(VOCABULARY)}
    last = max(entry.end for entry in entries.values())
    tokenizer = TensorEntry("U8", (7,), last, last + 7)
    return manifest | {"vocabulary": "", "tokenizer": about} | fields, entries | {"tokenizer": tokenizer}


def test_a_tokenizer_among_the_tensors_belongs_to_a_manifest_that_says_so() -> None:
    manifest, entries = json_snapshot()
    check_model(manifest, entries)
    none = {"tokenizer": {"kind": "none", "vocab_size": 11}}
    check_model(manifest | none, make_snapshot("adamw", "gpt2")[1])
    without = {name: entry for name, entry in entries.items() if name != "tokenizer"}
    for wrong, there in (
        (manifest, without),
        (manifest | {"tokenizer": {"kind": "none", "vocab_size": 11}}, entries),
        (manifest, entries | {"tokenizer": replace(entries["tokenizer"], dtype="F32")}),
        (manifest, entries | {"tokenizer": replace(entries["tokenizer"], shape=(7, 1))}),
        (manifest | {"tokenizer": {"kind": "pickle", "vocab_size": 11}}, without),
        (manifest | {"tokenizer": {"kind": "json", "vocab_size": 12}}, entries),
        (manifest | {"tokenizer": {"kind": "char", "vocab_size": 2}, "vocabulary": VOCABULARY}, without),
    ):
        with pytest.raises(CorruptSnapshot):
            check_model(wrong, there)


def test_a_tokenizer_that_a_snapshot_carries_and_that_is_none_is_one_sentence() -> None:
    manifest, _ = json_snapshot()
    tensors = {"tokenizer": torch.arange(7, dtype=torch.uint8)}
    with pytest.raises(UserError, match="the tokenizer of the snapshot cannot be used"):
        snapshot_tokenizer(snapshot_of(manifest, tensors))


@pytest.mark.parametrize("tokenizer", [None, CharTokenizer(VOCABULARY)])
def test_what_a_manifest_says_of_a_tokenizer_gives_it_back(tokenizer: CharTokenizer | None) -> None:
    fields, tensors = manifest_tokenizer(tokenizer, 12)
    copy = snapshot_tokenizer(snapshot_of(fields, tensors))
    assert (copy and copy.fingerprint()) == (tokenizer and tokenizer.fingerprint())
    assert fields["tokenizer"]["vocab_size"] == 12


def test_rows_of_an_embedding_follow_their_tokens() -> None:
    """As they are for the same tokenizer; a name without a row there is left out."""
    here, there = torch.zeros(4, 2), torch.arange(8.0).view(4, 2)
    abc, bcd = CharTokenizer("abc"), CharTokenizer("bcd")
    assert match_rows("wte", here, there, abc, abc) is there
    assert match_rows("wte", here, there, None, None) is there
    assert match_rows("wte", here, there, abc, bcd).tolist() == [[0, 0], [0, 1], [2, 3], [0, 0]]
    assert match_rows("wte", here, there[:1], abc, bcd).tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    assert match_rows("wte", here, there[:3], None, None).tolist() == here.tolist()


def test_weights_of_a_model_of_another_shape_name_the_settings() -> None:
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=16)
    initial = InitialWeights({}, None, replace(config, n_layer=5, n_head=4), "there")
    with pytest.raises(UserError, match=r"set model\.n_layer=5 model\.n_head=4"):
        match_weights(initial, config, {}, draw_zeros, None)


def draw_zeros(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape)


def test_weights_to_start_with_are_fitted_and_new_rows_are_drawn() -> None:
    """Positions are cut, rows follow their tokens, and everything else is as it was."""
    model, _ = make_model("adamw", "gpt2")
    config, shapes = model.config, {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    given["wpe.weight"] = torch.randn(20, 16)
    initial = InitialWeights(given, CharTokenizer(VOCABULARY), config, "there")
    found = match_weights(initial, config, shapes, draw_zeros, CharTokenizer("abcdefghijz"))
    assert {name: tuple(weight.shape) for name, weight in found.items()} == shapes
    assert (
        torch.equal(found["wte.weight"][:10], given["wte.weight"][:10]) and not found["wte.weight"][10].any()
    )
    assert torch.equal(found["wpe.weight"], given["wpe.weight"][:8])
    assert torch.equal(found["h.1.mlp.c_fc.weight"], given["h.1.mlp.c_fc.weight"])
    del given["ln_f.bias"]
    with pytest.raises(UserError, match=r"init_from=there holds .* another model \(ln_f\.bias: missing"):
        match_weights(initial, config, shapes, draw_zeros, None)
