from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.training import ARCHITECTURES, NAMES, Arch, Name, make_model

from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.data import CharTokenizer
from mingpt.errors import CorruptSnapshot, UserError
from mingpt.settings import to_dict
from mingpt.snapshot import to_safetensors
from mingpt.snapshot.tensors import TensorEntry, read_entries
from mingpt.weights import check_model, init_from, load_weights, open_weights

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
    return {"config": to_dict(config), "vocabulary": VOCABULARY}, read_entries(bytes(to_safetensors(tensors)))


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


def test_learned_positions_must_be_as_many_as_the_configuration_says() -> None:
    manifest, entries = make_snapshot("adamw", "gpt2")
    manifest["config"]["data"]["block_size"] = 10**15
    with pytest.raises(CorruptSnapshot, match=r"model\.wpe\.weight has shape \[8, 16\]"):
        check_model(manifest, entries)


@pytest.mark.parametrize("vocabulary", ["", "ba", "aab", "abc", "a" * 2_000_000])
def test_a_vocabulary_that_is_none_or_has_another_size_is_refused(vocabulary: str) -> None:
    manifest, entries = make_snapshot("muon", "modern")
    with pytest.raises(CorruptSnapshot):
        check_model(manifest | {"vocabulary": vocabulary}, entries)


def test_weights_of_another_type_or_model_are_refused() -> None:
    model, _ = make_model("adamw", "gpt2")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    load_weights(model, weights, "here")
    for other in (torch.zeros(11, 16, dtype=torch.int32), torch.zeros(11, 17)):
        with pytest.raises(UserError, match=r"here holds the weights of another model \(wte\.weight: "):
            load_weights(model, weights | {"wte.weight": other}, "here")


def test_a_model_for_fewer_tokens_takes_the_first_positions() -> None:
    model, _ = make_model("adamw", "gpt2")
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights["wpe.weight"] = torch.randn(20, 16)
    load_weights(model, weights, "here")
    assert model.wpe is not None
    assert torch.equal(model.wpe.weight, weights["wpe.weight"][:8])


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95" + bytes(100), b"PK\x03\x04" + bytes(100)])
def test_a_gpt2_file_that_is_none_is_one_sentence(content: bytes, tmp_path: Any) -> None:
    model, _ = make_model("adamw", "gpt2")
    path = tmp_path / "gpt2.safetensors"
    path.write_bytes(content)
    for where in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(UserError, match=f"snapshot.init_from={where} cannot be used"):
            init_from(model, open_weights(str(where)), CharTokenizer(VOCABULARY))
    save_file({"wte.weight": torch.full((11, 16), float("nan"))}, path)
    with pytest.raises(UserError, match="not finite"):
        init_from(model, open_weights(str(path)), CharTokenizer(VOCABULARY))
