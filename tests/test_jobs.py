"""Whole jobs, started as a user starts them: the same bits however often they die, wherever they go on."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Job, alive, children, command, final_hash, free_port, manifest, reached, records, wait_until

Start = Callable[..., Job]


def two_agents(start: Start, restarts: int, **settings: Any) -> list[Job]:
    """One worker each under two agents that meet at an endpoint; the README's commands show the other form."""
    meeting = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=test")
    return [start(command(workers=1, torchrun=meeting, restarts=restarts, **settings)) for _ in range(2)]


@pytest.mark.parametrize("workers", [None, 1, 3, 4])
def test_curve_and_bits_are_the_same_for_any_number_of_workers(
    workers: int | None, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # As torchrun starts workers by default, with no word on the rendezvous.
    done = start(command(workers=workers, torchrun=(f"--master_port={free_port()}",), run_dir=tmp_path, data__path=text)).finish()
    assert done.code == 0, done.err
    assert workers != 4 or "worker 3 reads 6-7" in done.err
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert {"config.yaml", "run.json", "metrics.jsonl", "log.txt"} <= {path.name for path in tmp_path.iterdir()}
    for name in ("train/loss", "val/loss"):
        expected, curve = records(undisturbed, name), records(tmp_path, name)
        assert expected.keys() == curve.keys() and len(curve) >= 4
        assert curve == expected
    assert final_hash(tmp_path) == final_hash(undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_no_bit(victim: int, start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    job = start(command(workers=2, restarts=3, run_dir=tmp_path, data__path=text))
    wait_until(reached(tmp_path, 12), job)
    os.kill(job.workers()[victim], signal.SIGKILL)
    done = job.finish()
    assert done.code == 0, done.err
    assert final_hash(tmp_path) == final_hash(undisturbed)
    assert records(tmp_path) == records(undisturbed) and records(tmp_path, "val/loss") == records(undisturbed, "val/loss")
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["status"] == "finished" and [entry["workers"] for entry in told["generations"]] == [2, 2]
    assert told["generations"][0]["end"] == f"worker {victim} vanished" and told["seconds_lost"] > 0
    (line,) = [line for line in done.err.splitlines() if "vanished at step" in line]
    assert (
        line
        == f"worker {victim} vanished at step {told['generations'][0]['to_step']}; resumed from {told['generations'][1]['from_step']} with 2 workers"
    )
    assert "Traceback" not in done.err.replace("traceback :", "")


@pytest.mark.parametrize("victim", [0, 1])
def test_two_agents_go_on_after_a_killed_worker(victim: int, start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    jobs = two_agents(start, 3, run_dir=tmp_path, data__path=text)
    wait_until(reached(tmp_path, 12), jobs[0])
    os.kill(jobs[victim].workers()[0], signal.SIGKILL)
    for done in [job.finish() for job in jobs]:
        assert done.code == 0, done.err
    assert final_hash(tmp_path) == final_hash(undisturbed)


def test_two_resumes_one_of_them_at_an_epochs_end(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The whole job is killed twice; a batch size of which a whole number of steps is an epoch puts one snapshot at its end."""
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": tmp_path / "text", "trainer__batch_size": 10, "snapshot__every": 1}
    n_train = 10 * 12 * 32 + 1  # 120 windows: an epoch is 12 steps of 10
    (tmp_path / "text").write_text(text.read_text()[: n_train * 10 // 9 + 1])
    whole = start(command(**settings | {"run_dir": tmp_path / "whole"})).finish()
    assert whole.code == 0, whole.err
    assert "1 worker" in whole.err and "12.0 steps per epoch" in whole.err
    for stop in (12, 17):
        job = start(command(**settings, trainer__eval_every=1000))
        path = tmp_path / "run" / "snapshots" / f"step_{stop:08d}.json"
        wait_until(path.exists, job)
        os.kill(job.process.pid, signal.SIGKILL)
        job.finish()
        for later in path.parent.glob("step_*"):  # the machine may be quicker than this test
            if int(later.stem[5:]) > stop:
                later.unlink()
        assert manifest(tmp_path / "run", stop)["windows"] == stop * 10
    assert start(command(**settings)).finish().code == 0
    assert final_hash(tmp_path / "run") == final_hash(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "no manifest"])
def test_a_damaged_snapshot_is_named_and_the_one_before_it_used(damage: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    last = run_dir / "snapshots" / "step_00000030.safetensors"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "no manifest":
        last.with_suffix(".json").unlink()
    else:
        last.write_bytes(content if damage == "flipped bit" else content[:-1])
    done = start(command(workers=2, run_dir=run_dir, data__path=text)).finish()
    assert done.code == 0, done.err
    assert f"snapshot of step 30 set aside as {run_dir}/snapshots/damaged-1-step_00000030.*: its " in done.err and "from step 25" in done.err
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert (run_dir / "snapshots" / "damaged-1-step_00000030.safetensors").exists()


def test_a_finished_run_says_so_and_a_longer_one_is_asked_for(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text}
    done = start(command(**settings, trainer__eval_only=True)).finish()
    assert done.code == 0 and f"val/loss {records(undisturbed, 'val/loss')[30]:.4f}" in done.err
    done = start(command(**settings)).finish()
    assert done.code == 0 and "already stands at step 30" in done.err
    assert final_hash(run_dir) == final_hash(undisturbed) and records(run_dir) == records(undisturbed)
    done = start(command(**settings, trainer__max_steps=32, snapshot__resume="changed")).finish()
    assert done.code == 0 and "trainer.max_steps: 30 -> 32" in done.err, done.err
    told = json.loads((run_dir / "run.json").read_text())
    assert told["changes"] == [{"step": 30, "settings": ["trainer.max_steps: 30 -> 32"]}] and max(records(run_dir)) == 32


def test_a_run_begins_with_the_weights_of_another(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Another text, other characters: shared ones keep their rows, and the first loss is far below a fresh model's."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("F", "é").replace("ADRIAN", "ÅDRIAN"))
    for where in (undisturbed, undisturbed / "snapshots" / "step_00000030.safetensors"):
        done = start(command(run_dir=tmp_path / where.name, data__path=other, snapshot__init_from=where, trainer__max_steps=0)).finish()
        assert done.code == 0, done.err
        assert records(tmp_path / where.name, "val/loss")[0] < records(undisturbed, "val/loss")[10]


def test_a_gpt2_file_can_be_the_beginning(start: Start, text: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    save_file(
        {f"transformer.{name.removeprefix('transformer.')}": tensor.clone() for name, tensor in theirs.transformer.state_dict().items()},
        tmp_path / "gpt2.safetensors",
    )
    done = start(
        command(
            run_dir=tmp_path / "run",
            data__path=text,
            model__arch="gpt2",
            optimizer__name="adamw",
            trainer__max_steps=0,
            snapshot__init_from=tmp_path / "gpt2.safetensors",
        )
    ).finish()
    assert done.code == 0 and "wte.weight begins afresh" in done.err, done.err
    from mingpt.snapshot import Folder

    mine = Folder(str(tmp_path / "run" / "snapshots")).read(0).part("model.")
    assert torch.equal(mine["h.1.mlp.c_fc.weight"], theirs.transformer.h[1].mlp.c_fc.weight.t()) and torch.equal(
        mine["wpe.weight"], theirs.transformer.wpe.weight[:32]
    )


def test_a_run_whose_snapshots_live_in_an_object_store_resumes(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="requirements-dev.txt installs it")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        store = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for key, value in store.items():
            monkeypatch.setenv(key, value)
        import fsspec

        bucket = fsspec.filesystem("s3", use_listings_cache=False)
        bucket.mkdir("runs")
        job = start(command(workers=2, run_dir=tmp_path, data__path=text, snapshot__path="s3://runs/one"))
        wait_until(lambda: bucket.exists("runs/one/step_00000010.json"), job)
        for pid in [*job.workers(), job.process.pid]:
            os.kill(pid, signal.SIGKILL)
        job.finish()
        done = start(command(workers=2, run_dir=tmp_path, data__path=text, snapshot__path="s3://runs/one")).finish()
        assert done.code == 0 and "resumed from" in done.err, done.err
        told = json.loads(bucket.cat_file("runs/one/step_00000030.json"))
        assert told["sha256"] == final_hash(undisturbed) and not list(tmp_path.glob("snapshots/*"))
    finally:
        server.stop()


def test_a_url_in_memory_serves_one_process_and_no_job(start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "snapshot__path": "memory://one", "trainer__max_steps": 5}
    assert start(command(**settings)).finish().code == 0
    done = start(command(workers=1, **settings)).finish()
    assert done.code != 0 and "snapshot.path memory://one lives in the memory of one process" in done.err


def test_a_model_that_cannot_be_compiled_trains_all_the_same(start: Start, text: Path, tmp_path: Path) -> None:
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = start(command(run_dir=tmp_path, data__path=text, trainer__compile=True, trainer__max_steps=2), CXX="/nowhere/c++", **empty).finish()
    assert done.code == 0 and "torch.compile failed" in done.err and "going on without it" in done.err, done.err


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_a_compiled_model_trains_to_the_same_bits_for_any_number_of_workers(start: Start, text: Path, tmp_path: Path) -> None:
    """One job also loses a worker while the other compiles, which is noticed before it has ended."""
    settings: dict[str, Any] = {"data__path": text, "trainer__compile": True, "model__dropout": 0.2, "trainer__max_steps": 4}
    cache = tmp_path / "cache"
    job = start(command(workers=2, restarts=1, run_dir=tmp_path / "2", **settings), TORCHINDUCTOR_CACHE_DIR=str(cache))
    wait_until(cache.exists, job)
    compiling, idle = job.workers()
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not alive(compiling), job, timeout=5)
    done = job.finish()
    assert done.code == 0 and "torch.compile failed" not in done.err, done.err
    done = start(command(workers=3, run_dir=tmp_path / "3", **settings), TORCHINDUCTOR_CACHE_DIR=str(cache)).finish()
    assert done.code == 0 and final_hash(tmp_path / "2", 4) == final_hash(tmp_path / "3", 4), done.err
    assert manifest(tmp_path / "2", 4)["software"]["compiled"] is True


def test_nothing_is_left_of_a_job_that_ended(start: Start, text: Path, tmp_path: Path) -> None:
    job = start(command(workers=2, run_dir=tmp_path, data__path=text, trainer__max_steps=2))
    workers = wait_until(lambda: len(found := job.workers()) == 2 and found, job)
    assert job.finish().code == 0 and not any(alive(pid) for pid in workers)
    assert children(job.process.pid) == [] and ROOT.exists()


TOO_MANY = """
import sys
sys.argv[0] = "train.py"
sys.path.insert(0, ".")
import train
import mingpt.trainer
mingpt.trainer.check_workers = lambda *_: None  # as in a later generation, when nodes have joined
train.main()
"""


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_workers_too_many_idle_and_change_nothing(reduction: str, start: Start, text: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOO_MANY)
    for workers in (3, 1):
        words = command(
            workers=workers,
            run_dir=tmp_path / str(workers),
            data__path=text,
            trainer__micro_batch_size=4,
            trainer__max_steps=4,
            trainer__reduction=reduction,
        )
        done = start([str(tmp_path / "train.py") if word == "train.py" else word for word in words]).finish()
        assert done.code == 0, done.err
    assert reduction == "fast" or final_hash(tmp_path / "3", 4) == final_hash(tmp_path / "1", 4)
    one, three = records(tmp_path / "1"), records(tmp_path / "3")
    assert all(abs(one[step] - three[step]) < 1e-3 for step in one)
