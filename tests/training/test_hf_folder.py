import json
import logging
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
from support.hf_models import their_model
from support.models import ARCHITECTURES, Arch
from support.pages import blocks

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import parameter_shapes
from mingpt.model.hf import from_hf
from mingpt.training.initial_weights import open_weights

CONFIG = {arch: ModelConfig(arch=arch, n_layer=2, n_head=3, n_embd=24) for arch in ARCHITECTURES}
WEIGHTS, WTE = "model.safetensors", "transformer.wte.weight"


def save(arch: Arch, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write a model as transformers does; returns its tensors under our names."""
    theirs = their_model(CONFIG[arch])
    theirs.save_pretrained(folder, **options)
    names = parameter_shapes(CONFIG[arch], vocab_size=31, block_size=24)
    return from_hf(theirs.state_dict(), CONFIG[arch], names)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the folder's tensor file, with the tensors that `change` has changed or returns."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, folder / WEIGHTS)


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["whole", "sharded"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_that_transformers_has_written_gives_its_weights(
    arch: Arch, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = save(arch, tmp_path, **options)
    assert (tmp_path / WEIGHTS).exists() == (not options)
    found = open_weights(str(tmp_path))
    check_same(found.tensors, expected)
    assert (found.model, found.tokenizer, found.vocab_size) == (CONFIG[arch], None, 31)


def test_an_old_file_of_gpt2_may_lack_the_prefix_and_hold_masks_and_the_tied_head(tmp_path: Path) -> None:
    expected = save("gpt2", tmp_path)

    def age(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        old["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
        old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        return old | {"lm_head.weight": old["wte.weight"].clone()}

    change_tensors(tmp_path, age)
    check_same(open_weights(str(tmp_path)).tensors, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_of_other_precisions_become_float32(
    arch: Arch, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = save(arch, tmp_path)
    change_type(tmp_path, dtype)
    check_same(
        open_weights(str(tmp_path)).tensors, {name: one.to(dtype).float() for name, one in expected.items()}
    )
    assert ("holds float64, which is rounded to float32" in caplog.text) == (dtype == torch.float64)


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
    check_same(open_weights(str(tmp_path / "nano")).tensors, expected | zeros)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused_by_name(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[WTE] + 1}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from wte\.weight"):
        open_weights(str(tmp_path))


def change_config(folder: Path, **changes: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_type(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: {name: one.to(dtype) for name, one in tensors.items()})


def move_weights(folder: Path, name: str) -> None:
    """Move the tensor file to `name`, from where an index takes all tensors."""
    names = dict.fromkeys(load_file(folder / WEIGHTS), name)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / WEIGHTS).rename(folder / name)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").write_text("{" * 9), "config.json' is not a valid JSON file"),
    (lambda at: (at / "config.json").write_text('{"model_type": "llama"}'), "model_type is 'llama'"),
    (lambda at: change_config(at, n_layer=10**9), "asks for 1,000,000,000 layers, and there are 28 tensors"),
    (
        lambda at: change_config(at, vocab_size=10**12),
        r"shape \(31, 24\), and config.json asks for \(10{12}, 24\)",
    ),
    (lambda at: change_config(at, n_positions=10**9), r"\(24, 24\), and config.json asks for \(10{9}, 24\)"),
    (lambda at: change_config(at, n_embd=3 * 10**8), r"asks for \(31, 300000000\)"),
    (lambda at: (at / WEIGHTS).unlink(), f"No such file or directory: .*{WEIGHTS}"),
    (lambda at: (at / WEIGHTS).rename(at / "pytorch_model.bin"), "only pytorch_model.bin, a pickle"),
    (lambda at: (at / WEIGHTS).write_bytes(b"\x80\x04" + bytes(50)), "invalid header"),
    (lambda at: change_tensors(at, lambda one: one.pop(WTE)), f"the tensor '{WTE}' is missing"),
    (lambda at: change_type(at, torch.int8), "it holds torch.int8, as quantized models do"),
    (lambda at: change_type(at, torch.float8_e4m3fn), "it holds torch.float8_e4m3fn, as quantized"),
    (lambda at: change_type(at, torch.complex64), "it holds torch.complex64"),
    (
        lambda at: move_weights(at, "../model-1.safetensors"),
        r"names '\.\./model-1.safetensors', and only files beside",
    ),
    (lambda at: move_weights(at, str(at.parent / "1.safetensors")), "1.safetensors', and only files beside"),
    (lambda at: move_weights(at, "sub/1.safetensors"), "names 'sub/1.safetensors', and only files beside"),
    (lambda at: change_tensors(at, lambda one: one.update({WTE: torch.ones(9, 24)})), r"has shape \(9, 24\)"),
    (lambda at: change_tensors(at, lambda one: one.update({WTE: one[WTE] * torch.nan})), "not finite"),
    (
        lambda at: change_tensors(at, lambda one: one.update(score=torch.ones(1))),
        "it holds 'transformer.score'",
    ),
    (lambda at: (at / "tokenizer.json").write_text("{}"), "tokenizer"),
]


@pytest.mark.parametrize(("spoil", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_a_folder_that_is_damaged_or_of_another_model_is_one_sentence(
    spoil: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    save("gpt2", tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        open_weights(str(tmp_path))
    assert str(caught.value).startswith(f"snapshot.init_from={tmp_path} cannot be used: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_that_the_refusal_of_a_pickle_names_converts_it(tmp_path: Path) -> None:
    expected = save("gpt2", tmp_path)
    torch.save(their_model(CONFIG["gpt2"]).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"only pytorch_model\.bin, a pickle") as caught:
        open_weights(str(tmp_path))
    python, *words = shlex.split(str(caught.value).partition("convert it by ")[2])
    assert python == "python"
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    check_same(open_weights(str(tmp_path)).tensors, expected)


def test_the_names_of_gpt2_are_downloaded_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other name is looked up on the hub."""
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    save("gpt2", tmp_path / "cache")
    open_weights("gpt2-xl")
    for where in ("openai-community/gpt2", "gpt3"):
        with pytest.raises(UserError, match=f"there is no snapshot in .*/{where}"):
            open_weights(where)
    save("gpt2", tmp_path / "gpt2")
    open_weights("gpt2")
    assert asked == ["openai-community/gpt2-xl"]
