"""A model of Hugging Face's is imported, trained and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finish, manifest
from support.hf_models import load_with_transformers, their_model
from support.jobs import read_metric
from support.models import ARCHITECTURES, Arch, make_tokens
from support.sampling import sample
from support.vocabularies import cl100k_like

from mingpt.config import ModelConfig
from mingpt.data import JsonTokenizer
from mingpt.model import GPT
from mingpt.snapshot import open_snapshot
from mingpt.snapshot.contents import load_weights
from mingpt.tools.export import export
from mingpt.tools.import_model import import_model


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_is_imported_trained_and_exported_with_its_tokenizer(
    arch: Arch, finish: Finish, text: Path, tmp_path: Path
) -> None:
    """Only the first of two workers reads the import, which is gone when the run goes on."""
    bpe = JsonTokenizer(cl100k_like(text.read_text(), 300))
    theirs = their_model(ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=32), len(bpe), 32)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(bpe.to_bytes())
    origin, run = tmp_path / "origin", tmp_path / "run"
    import_model(str(tmp_path / "hf"), str(origin))
    assert sample(origin, "--prompt", "The ", "--tokens", "9").stdout.startswith("The ")
    settings: dict[str, Any] = {"run_dir": run, "model__arch": arch, "snapshot__init_from": origin}
    finish(trainer__workers=2, trainer__max_steps=2, **settings)
    origin.rename(tmp_path / "moved")
    finish(trainer__workers=1, trainer__max_steps=4, snapshot__resume="changed", **settings)
    assert sorted(read_metric(run, "train/loss")) == [1, 2, 3, 4]
    export(str(run), str(tmp_path / "out"))
    back, tokenizer = load_with_transformers(tmp_path / "out")
    trained = open_snapshot(str(run))
    ours = GPT(trained.config.model, vocab_size=len(bpe), block_size=32).eval()
    load_weights(ours, trained.tensors("model."), "the run")
    tokens = make_tokens(vocab_size=len(bpe))
    with torch.no_grad():
        logits, before = ours(tokens)[0], theirs(tokens).logits
        assert logits is not None and (back(tokens).logits - logits).abs().max() < 1e-4
    assert 1e-4 < (logits - before).abs().max() < 1  # trained, from these weights
    assert tokenizer.encode(text.read_text()[:500]) == bpe.encode(text.read_text()[:500]).tolist()
    assert manifest(run, 4)["tokenizer"] == manifest(tmp_path / "moved", 0)["tokenizer"]
