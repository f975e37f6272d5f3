"""A run that begins with a model of Hugging Face's."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, manifest
from support.hf_models import their_model
from support.jobs import read_metric
from support.sampling import sample
from support.vocabularies import cl100k_like

from mingpt.config import ModelConfig
from mingpt.data import JsonTokenizer
from mingpt.tools.import_model import import_model


@pytest.mark.slow
def test_an_import_is_sampled_and_trained_and_may_be_gone_when_the_run_goes_on(
    finish: Finish, text: Path, tmp_path: Path
) -> None:
    """Only the first of two workers reads the import."""
    bpe = JsonTokenizer(cl100k_like(text.read_text(), 300))
    theirs = their_model(ModelConfig(n_layer=2, n_head=2, n_embd=32), len(bpe), 32)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(bpe.to_bytes())
    origin, run = tmp_path / "origin", tmp_path / "run"
    import_model(str(tmp_path / "hf"), str(origin))
    assert sample(origin, "--prompt", "The ", "--tokens", "9").stdout.startswith("The ")
    settings: dict[str, Any] = {"run_dir": run, "snapshot__init_from": origin}
    finish(trainer__workers=2, trainer__max_steps=2, **settings)
    origin.rename(tmp_path / "moved")
    finish(trainer__workers=1, trainer__max_steps=4, snapshot__resume="changed", **settings)
    assert sorted(read_metric(run, "train/loss")) == [1, 2, 3, 4]
    assert manifest(run, 4)["tokenizer"] == manifest(tmp_path / "moved", 0)["tokenizer"]
