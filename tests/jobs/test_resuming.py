"""A job that is started again, from its own snapshots or from the weights of another run."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Start, command, final_hash, manifest
from safetensors.torch import save_file

from mingpt.snapshot import SnapshotStore
from mingpt.tools.jobs import read_history, read_metric, torchrun


@pytest.mark.slow
def test_two_resumes_one_of_them_at_the_end_of_an_epoch(start: Start, text: Path, tmp_path: Path) -> None:
    """The whole job is killed twice; the batch size makes an epoch a whole number of steps."""
    settings: dict[str, Any] = {"data__path": tmp_path / "text", "trainer__batch_size": 10}
    settings |= {"snapshot__every": 1, "trainer__workers": 1}
    n_train = 10 * 12 * 32 + 1  # 120 windows: an epoch is 12 steps of 10
    (tmp_path / "text").write_text(text.read_text()[: n_train * 10 // 9 + 1])
    whole = start(command(run_dir=tmp_path / "whole", **settings))
    assert whole.wait() == 0, whole.err()
    assert "1 worker" in whole.err() and "12.0 steps per epoch" in whole.err()
    for stop in (12, 17):
        job = start(command(run_dir=tmp_path / "run", **settings, trainer__eval_every=1000))
        path = tmp_path / "run" / "snapshots" / f"step_{stop:08d}.json"
        job.wait_until(path.exists)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        for later in path.parent.glob("step_*"):  # the machine may be quicker than this test
            if int(later.name[5:13]) > stop:
                later.unlink()
        assert manifest(tmp_path / "run", stop)["windows"] == stop * 10
    last = start(command(run_dir=tmp_path / "run", **settings))
    assert last.wait() == 0, last.err()
    assert [entry["from_step"] for entry in read_history(tmp_path / "run")["generations"]] == [0, 12, 17]
    assert final_hash(tmp_path / "run") == final_hash(tmp_path / "whole")


def test_a_damaged_snapshot_is_named_and_the_one_before_it_used(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    last = run_dir / "snapshots" / "step_00000030.safetensors"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4
    last.write_bytes(content)
    job = start(command(launcher=torchrun(2), run_dir=run_dir, data__path=text))
    assert job.wait() == 0, job.err()
    name = "damaged-1-step_00000030"
    assert f"snapshot of step 30 set aside as {run_dir}/snapshots/{name}.*: its " in job.err()
    assert "resumed from step 25" in job.err()
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert (run_dir / "snapshots" / f"{name}.safetensors").exists()


def test_a_finished_run_says_so_and_trains_on_only_if_a_longer_one_is_asked_for(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__workers": 1}
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    evaluation = start(command(**settings, trainer__eval_only=True))
    assert evaluation.wait() == 0, evaluation.err()
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    assert f"val/loss {read_metric(undisturbed, 'val/loss')[30]:.4f}" in evaluation.err()
    same = start(command(**settings))
    assert same.wait() == 0 and "already stands at step 30" in same.err(), same.err()
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert read_metric(run_dir) == read_metric(undisturbed)
    longer = start(command(**settings, trainer__max_steps=32, snapshot__resume="changed"))
    assert longer.wait() == 0 and "trainer.max_steps: 30 -> 32" in longer.err(), longer.err()
    changes = read_history(run_dir)["changes"]
    assert changes == [{"step": 30, "settings": ["trainer.max_steps: 30 -> 32"]}]
    assert max(read_metric(run_dir)) == 32


def test_a_run_that_was_not_compiled_is_not_when_it_is_to_be_a_longer_one(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A fresh run of so many steps would be."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__workers": 1}
    settings |= {"trainer__max_steps": 10**8, "snapshot__resume": "changed"}
    job = start(command(**settings))
    job.wait_until((run_dir / "snapshots" / "step_00000035.json").exists)
    assert "\nnot compiled: trainer.compile=auto goes on as the snapshot was computed" in job.err()
    assert manifest(run_dir, 35)["software"]["compiled"] is False


def test_a_run_begins_with_the_weights_of_another(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Of another text: shared characters keep their rows, and the first loss is far below a fresh model's."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("F", "é").replace("ADRIAN", "ÅDRIAN"))
    settings: dict[str, Any] = {"data__path": other, "trainer__max_steps": 0, "trainer__workers": 1}
    for origin in (undisturbed, undisturbed / "snapshots" / "step_00000030.safetensors"):
        run_dir = tmp_path / origin.name
        job = start(command(run_dir=run_dir, snapshot__init_from=origin, **settings))
        assert job.wait() == 0, job.err()
        assert read_metric(run_dir, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]


def test_a_run_begins_with_the_weights_of_a_gpt2_file(start: Start, text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).transformer
    tensors = {f"transformer.{name}": tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(tensors, tmp_path / "gpt2.safetensors")
    settings: dict[str, Any] = {"model__arch": "gpt2", "optimizer__name": "adamw", "trainer__max_steps": 0}
    settings |= {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 1}
    job = start(command(snapshot__init_from=tmp_path / "gpt2.safetensors", **settings))
    assert job.wait() == 0 and "wte.weight: 0 of 50 rows taken over" in job.err(), job.err()
    ours = SnapshotStore(str(tmp_path / "run" / "snapshots")).read(0).tensors("model.")
    assert torch.equal(ours["h.1.mlp.c_fc.weight"], theirs.h[1].mlp.c_fc.weight.t())
    assert torch.equal(ours["wpe.weight"], theirs.wpe.weight[:32])
