import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import refusal, refused
from support.golden import Golden
from support.hf_models import their_model
from support.models import ARCHITECTURES, Arch
from support.pages import blocks

from mingpt.config import ModelConfig
from mingpt.model import parameter_shapes
from mingpt.snapshot import Snapshot, open_snapshot
from mingpt.tools.hugging_face import from_hf
from mingpt.tools.import_model import import_model, main
from mingpt.tools.jobs import ROOT
from mingpt.training.contents import check_model

CONFIG = {arch: ModelConfig(arch=arch, n_layer=2, n_head=3, n_embd=24) for arch in ARCHITECTURES}
WEIGHTS, WTE = "model.safetensors", "transformer.wte.weight"
Tensors = dict[str, torch.Tensor]


def save(arch: Arch, folder: Path) -> Tensors:
    theirs = their_model(CONFIG[arch])
    theirs.save_pretrained(folder)
    names = parameter_shapes(CONFIG[arch], vocab_size=31, block_size=24)
    return from_hf(theirs.state_dict(), CONFIG[arch], names)


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_type(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: {name: one.to(dtype) for name, one in tensors.items()})


def check_import(source: Path | str, out: Path, expected: Tensors) -> Snapshot:
    import_model(str(source), str(out))
    snapshot = open_snapshot(str(out), check_model)
    found = snapshot.tensors("model.")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return snapshot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_that_transformers_has_written_becomes_a_run_in_float32(
    arch: Arch, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The folder has no tokenizer."""
    hf, out = tmp_path / "hf", tmp_path / "out"
    expected = save(arch, hf)
    change_type(hf, dtype)
    out.mkdir()
    snapshot = check_import(hf, out, {name: one.to(dtype).float() for name, one in expected.items()})
    manifest = snapshot.manifest
    assert (manifest.step, manifest.tokenizer.kind, manifest.tokenizer.vocab_size) == (0, "none", 31)
    assert (snapshot.config.model, snapshot.config.data.block_size) == (CONFIG[arch], 24)
    assert refused(main, hf, out) == f"error: {out} is not empty: give another folder"


def test_an_old_file_of_gpt2_may_lack_the_prefix_and_hold_masks_and_the_tied_head(tmp_path: Path) -> None:
    expected = save("gpt2", tmp_path)

    def age(tensors: Tensors) -> Tensors:
        old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        old["h.0.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8)
        old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        return old | {"lm_head.weight": old["wte.weight"].clone()}

    change_tensors(tmp_path, age)
    check_import(tmp_path, tmp_path / "out", expected)


def test_the_documented_command_turns_nanogpts_file_into_such_a_folder(tmp_path: Path) -> None:
    # A model without biases, as its option tells, and a compiled model.
    expected = save("gpt2", tmp_path)
    zeros = {name: torch.zeros_like(one) for name, one in expected.items() if name.endswith(".bias")}
    theirs = {f"_orig_mod.transformer.{name}": expected[name] for name in expected.keys() - zeros.keys()}
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 24, "vocab_size": 31, "bias": False}
    checkpoint = {"model": theirs, "model_args": sizes, "iter_num": 7, "best_val_loss": torch.tensor(1.5)}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    program = next(block[2] for block in blocks(ROOT / "docs" / "data.md") if "file" in block[1])
    subprocess.run([sys.executable, "-c", program, "ckpt.pt", "nano"], check=True, cwd=tmp_path)
    check_import(tmp_path / "nano", tmp_path / "out", expected | zeros)


def with_wte(folder: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str = WTE) -> None:
    change_tensors(folder, lambda tensors: tensors | {name: change(tensors[WTE])})


# What other packages say.
THEIRS = re.compile("It looks like.*|Error while.*|Exception:.*|(?<=rope_parameters is ).*")
ROPE = {"rope_type": "default", "rope_theta": 5e5}
# {what is wrong with a folder: how it comes to be so}
SPOILT: dict[str, tuple[Arch, Callable[[Path], object]]] = {
    "no config.json": ("gpt2", lambda at: (at / "config.json").unlink()),
    "another model": ("gpt2", lambda at: (at / "config.json").write_text('{"model_type": "llama"}')),
    "too many tokens": ("gpt2", lambda at: change_config(at, vocab_size=10**12)),
    "no weights": ("gpt2", lambda at: (at / WEIGHTS).unlink()),
    "a pickle": ("gpt2", lambda at: (at / WEIGHTS).write_bytes(b"\x80\x04" + bytes(50))),
    "a tensor less": (
        "gpt2",
        lambda at: change_tensors(at, lambda all: {k: all[k] for k in all if k != WTE}),
    ),
    "int8": ("gpt2", lambda at: change_type(at, torch.int8)),
    "another shape": ("gpt2", lambda at: with_wte(at, lambda wte: wte[:9].clone())),
    "not finite": ("gpt2", lambda at: with_wte(at, lambda wte: wte * torch.nan)),
    "a tensor more": ("gpt2", lambda at: with_wte(at, torch.ones_like, "score")),
    "another head": ("gpt2", lambda at: with_wte(at, lambda wte: wte + 1, "lm_head.weight")),
    "activation": ("gpt2", lambda at: change_config(at, activation_function="relu")),
    "epsilon": ("gpt2", lambda at: change_config(at, layer_norm_epsilon=1e-6)),
    "no scale": ("gpt2", lambda at: change_config(at, scale_attn_weights=False)),
    "scale by layer": ("gpt2", lambda at: change_config(at, scale_attn_by_inverse_layer_idx=True)),
    "own head": ("gpt2", lambda at: change_config(at, tie_word_embeddings=False)),
    "silu": ("modern", lambda at: change_config(at, hidden_act="silu")),
    "epsilon of the norm": ("modern", lambda at: change_config(at, rms_norm_eps=1e-5)),
    "softcap": ("modern", lambda at: change_config(at, final_logit_softcapping=15.0)),
    "shared keys": ("modern", lambda at: change_config(at, num_key_value_heads=1)),
    "tied head": ("modern", lambda at: change_config(at, tie_word_embeddings=True)),
    "other angles": ("modern", lambda at: change_config(at, rope_parameters=ROPE)),
    "scaled angles": (
        "modern",
        lambda at: change_config(at, rope_parameters={"rope_type": "linear", "factor": 2.0}),
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_folder_that_is_damaged_or_of_another_model_is_one_sentence(
    what: str, tmp_path: Path, golden: Golden
) -> None:
    arch, spoil = SPOILT[what]
    save(arch, tmp_path)
    spoil(tmp_path)
    golden(THEIRS.sub("THEIR WORDS", refusal(import_model, str(tmp_path), str(tmp_path / "out"))))
    assert not (tmp_path / "out").exists()


def test_gpt2_comes_from_the_hubs_cache_without_a_network_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other name is looked up on the hub."""
    cache = tmp_path / "cache" / "models--openai-community--gpt2-xl"
    expected = save("gpt2", cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    check_import("gpt2-xl", tmp_path / "xl", expected)
    for name in ("gpt2", "openai-community/gpt2-xl"):
        assert refusal(import_model, name, str(tmp_path / "out")).startswith(f"{name} cannot be used: ")
    check_import("gpt2", tmp_path / "out", save("gpt2", tmp_path / "gpt2"))
