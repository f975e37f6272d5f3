"""Runs that start with the weights of a folder in Hugging Face's format, exported here."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finish, manifest
from support.jobs import read_metric
from support.vocabularies import cl100k_like

from mingpt.snapshot import SnapshotStore
from mingpt.tools.export import export


@pytest.mark.slow
def test_a_run_that_was_exported_comes_back_bit_for_bit_with_its_tokenizer(
    finish: Finish, text: Path, tmp_path: Path
) -> None:
    """Only the first of two workers reads the folder, which has the only tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes(cl100k_like(text.read_text(), 300))
    settings: dict[str, Any] = {"model__arch": "gpt2"}
    first: dict[str, Any] = {"data__tokenizer": tmp_path / "tokenizer.json", "trainer__max_steps": 5}
    finish(trainer__workers=1, run_dir=tmp_path / "run", **(settings | first))
    export(str(tmp_path / "run"), str(tmp_path / "hf"))
    given: dict[str, Any] = settings | {"snapshot__init_from": tmp_path / "hf", "trainer__max_steps": 0}
    finish(trainer__workers=2, run_dir=tmp_path / "again", trainer__sample_tokens=5, **given)
    before = SnapshotStore(str(tmp_path / "run" / "snapshots")).read(5).tensors("model.")
    after = SnapshotStore(str(tmp_path / "again" / "snapshots")).read(0).tensors("model.")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizers = [manifest(tmp_path / name, step)["tokenizer"] for name, step in (("run", 5), ("again", 0))]
    assert tokenizers[0] == tokenizers[1]
    assert re.search(r"\d step 0/0  val/loss .*\n.*\d {5}", (tmp_path / "again" / "log.txt").read_text())
    assert read_metric(tmp_path / "run", "val/loss")[5] == read_metric(tmp_path / "again", "val/loss")[0]
