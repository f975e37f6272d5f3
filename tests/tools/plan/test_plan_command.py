"""`python -m mingpt plan`: one screen, and one sentence for each mistake."""

from pathlib import Path

import numpy as np
import pytest

from mingpt.base.command import run_command
from mingpt.tools.plan.command import main

TINY = ["model.n_layer=1", "model.n_embd=16", "data.block_size=32"]


def output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([*TINY, *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_plan_is_one_screen_with_a_row_for_each_strategy(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output(capsys, f"data.path={text}", "trainer.dtype=bfloat16", "--workers", 2)
    lines = said.splitlines()
    assert len(lines) <= 24
    assert "18,000 tokens, vocabulary of 50; 35.1 steps per epoch, 340 steps in all" in said
    labels = ("parallel=ddp ", "parallel=ddp shard_optimizer=true", "parallel=fsdp ")
    for label in (*labels, "parallel=fsdp recompute=block", "fsdp_param_dtype=bfloat16"):
        assert any(line.startswith(label) or label in line for line in lines)
    assert lines[-1] == "trainer.parallel=ddp fits"
    assert any(line.startswith("not compiled: trainer.compile=auto estimates 22 s") for line in lines)
    assert "in GB; this machine's among 2:" in said


def test_a_gpus_memory_decides(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.path={text}", "model.n_layer=48", "model.n_embd=1600", "model.n_head=25"]
    assert main([*words, "--workers", "8", "--gpu_memory", "12GB"]) == 0
    said = capsys.readouterr().out
    assert "not measured" in said
    ddp = next(line for line in said.splitlines() if line.startswith("parallel=ddp "))
    assert ddp.split()[-1] == "no" and " fits" in said.splitlines()[-1]
    assert "bfloat16 on 8 workers, GPU" in said


def test_shards_give_their_number_of_tokens_and_a_given_vocabulary_needs_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.zeros(3201, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.zeros(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    said = output(capsys, f"data.path={tmp_path}")
    assert "3,201 tokens, vocabulary of 50,257; 6.2 steps per epoch" in said
    said = output(capsys, "data.path=nowhere.txt", "data.vocab_size=1000")
    assert "steps per epoch" in said and "not known" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "0"], "--workers must be at least 1, not 0"),
        (
            ["--workers", "many"],
            "argument --workers: invalid int value: 'many'; see python -m mingpt plan --help",
        ),
        (["--workers", "9"], "9 workers cannot share the 8 micro-batches of a step"),
        (["--gpu_memory", "80 apples"], "argument --gpu_memory: invalid size value: '80 apples'"),
        (["--gpu_memory", "80"], "argument --gpu_memory: 80 means 80 bytes: write the unit, as in 80GB; see"),
        (["trainer.device=cuda"], "how much memory does a GPU have? Give --gpu_memory"),
        (["--gpu=H100"], "unknown setting 'gpu'"),
        (["--measure"], "--measure needs a value"),
        (["data.path=nowhere.txt"], "data.path nowhere.txt does not exist"),
        (["snapshot.init_from=gpt2"], "with snapshot.init_from the vocabulary is that of these weights"),
        (["trainer.paralel=ddp"], "unknown setting 'trainer.paralel'; did you mean 'trainer.parallel'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, [*TINY, *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {sentence}") and said.err.count("\n") == 1
