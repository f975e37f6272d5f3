import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from support.faults import FaultyDisk
from support.hf_models import their_model
from support.models import ARCHITECTURES, Arch
from support.pages import blocks
from support.vocabularies import cl100k_like

from mingpt.base.command import run_command
from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import parameter_shapes
from mingpt.snapshot import Snapshot, open_snapshot
from mingpt.tools.hugging_face import from_hf, import_transformers
from mingpt.tools.import_model import import_model, main
from mingpt.training.contents import check_model

CONFIG = {arch: ModelConfig(arch=arch, n_layer=2, n_head=3, n_embd=24) for arch in ARCHITECTURES}
WEIGHTS, WTE = "model.safetensors", "transformer.wte.weight"
Tensors = dict[str, torch.Tensor]


def save(arch: Arch, folder: Path) -> Tensors:
    """Write a model as transformers does; return its tensors under our names."""
    theirs = their_model(CONFIG[arch])
    theirs.save_pretrained(folder)
    names = parameter_shapes(CONFIG[arch], vocab_size=31, block_size=24)
    return from_hf(theirs.state_dict(), CONFIG[arch], names)


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Rewrite the folder's tensor file, with the tensors that `change` has changed or returns."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, folder / WEIGHTS)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_type(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: {name: one.to(dtype) for name, one in tensors.items()})


def check_import(source: Path | str, out: Path, expected: Tensors) -> Snapshot:
    """Import `source`; return the snapshot, which has these weights."""
    import_model(str(source), str(out))
    snapshot = open_snapshot(str(out), check_model)
    found = snapshot.tensors("model.")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return snapshot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_that_transformers_has_written_becomes_a_run_in_float32(
    arch: Arch, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert run_command(main, [str(hf), str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} is not empty: give another folder\n"


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


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").unlink(), "neither a folder with config.json, nor one of gpt2, "),
    (lambda at: (at / "config.json").write_text("{" * 9), "config.json' is not a valid JSON file"),
    (
        lambda at: (at / "config.json").write_text('{"model_type": "llama"}'),
        "model_type is 'llama', and only",
    ),
    (lambda at: change_config(at, n_layer=10**9), "asks for 1,000,000,000 layers, and there are 28 tensors"),
    (
        lambda at: change_config(at, vocab_size=10**12),
        r"shape \(31, 24\), and config.json asks for \(10{12}, 24\)",
    ),
    (lambda at: change_config(at, n_positions=10**9), r"\(24, 24\), and config.json asks for \(10{9}, 24\)"),
    (lambda at: change_config(at, n_embd=3 * 10**8), r"asks for \(31, 300000000\)"),
    (lambda at: (at / WEIGHTS).unlink(), f"it has no {WEIGHTS}; if you trust its other files"),
    (lambda at: (at / WEIGHTS).write_bytes(b"\x80\x04" + bytes(50)), "invalid header"),
    (lambda at: change_tensors(at, lambda one: one.pop(WTE)), f"the tensor '{WTE}' is missing"),
    (lambda at: change_type(at, torch.int8), "it holds torch.int8, as quantized models do"),
    (lambda at: change_type(at, torch.float8_e4m3fn), "it holds torch.float8_e4m3fn, as quantized"),
    (lambda at: change_type(at, torch.complex64), "it holds torch.complex64"),
    (lambda at: change_tensors(at, lambda one: one.update({WTE: torch.ones(9, 24)})), r"has shape \(9, 24\)"),
    (lambda at: change_tensors(at, lambda one: one.update({WTE: one[WTE] * torch.nan})), "not finite"),
    (
        lambda at: change_tensors(at, lambda one: one.update(score=torch.ones(1))),
        "it holds 'transformer.score'",
    ),
    (
        lambda at: change_tensors(at, lambda one: one.update({"lm_head.weight": one[WTE] + 1})),
        r"lm_head\.weight differs from wte\.weight",
    ),
    (lambda at: (at / "tokenizer.json").write_text("{}"), "this is not a tokenizer.json"),
    (
        lambda at: (at / "tokenizer.json").write_bytes(cl100k_like("ab")),
        "its tokenizer has .* tokens, and the",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_a_folder_that_is_damaged_or_of_another_model_is_one_sentence(
    spoil: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    save("gpt2", tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        import_model(str(tmp_path), str(tmp_path / "out"))
    assert str(caught.value).startswith(f"{tmp_path} cannot be used: ")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


OTHERS: list[tuple[Arch, dict[str, Any], str]] = [
    ("gpt2", {"n_inner": 100}, "n_inner is 100, and only None and 96 can be used"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ("gpt2", {"n_head": 5}, r"n_embd \(24\) must be divisible by .*n_head \(5\)"),
    ("modern", {"intermediate_size": 100}, "intermediate_size is 100, and only 96"),
    ("modern", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("modern", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("modern", {"final_logit_softcapping": 15.0}, "final_logit_softcapping is 15.0, and only None"),
    ("modern", {"num_key_value_heads": 1}, "num_key_value_heads is 1, and only 3"),
    ("modern", {"attention_bias": True}, "attention_bias is True"),
    ("modern", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("modern", {"head_dim": 24}, "head_dim is 24, and only 8"),
    ("modern", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta': 500000.0"),
    ("modern", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'rope_type': 'linear'"),
]


@pytest.mark.parametrize(("arch", "change", "sentence"), OTHERS, ids=lambda value: str(value)[:60])
def test_another_model_is_one_sentence_that_names_the_field(
    arch: Arch, change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save(arch, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(UserError, match=sentence):
        import_model(str(tmp_path), str(tmp_path / "out"))


@pytest.mark.parametrize("why", ["safetensors>=0.8.0 is required", "No module named 'transformers'"])
def test_transformers_that_cannot_be_imported_is_one_sentence(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(f"raise ImportError({why!r} + '\\nTry:')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(UserError, match=rf"\(ImportError: {why}\): pip install --upgrade 'tr.*the extra hf"):
        import_transformers()


@pytest.mark.slow
def test_the_command_that_the_refusal_of_other_files_names_converts_them(tmp_path: Path) -> None:
    expected = save("gpt2", tmp_path)
    torch.save(their_model(CONFIG["gpt2"]).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"a pickle such as pytorch_model\.bin can run any code") as caught:
        import_model(str(tmp_path), str(tmp_path / "out"))
    python, *words = shlex.split(str(caught.value).partition("make one file of them by ")[2])
    assert python == "python"
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    check_import(tmp_path, tmp_path / "out", expected)


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
        with pytest.raises(UserError, match=f"^{name} cannot be used: "):
            import_model(name, str(tmp_path / "out"))
    check_import("gpt2", tmp_path / "out", save("gpt2", tmp_path / "gpt2"))
    for where in ("gpt2-xl", str(tmp_path / "gpt2")):
        with pytest.raises(UserError, match="import it first: python -m mingpt import SOURCE OUT"):
            open_snapshot(where)


def test_a_full_disk_leaves_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path)
    FaultyDisk(monkeypatch, "replace", ".optimizer.safetensors")
    with pytest.raises(UserError, match=f"{tmp_path}/out cannot be written: No space left on device"):
        import_model(str(tmp_path), str(tmp_path / "out"))
    assert list((tmp_path / "out" / "snapshots").iterdir()) == []
