import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from support.faults import FaultyDisk
from support.hf_models import load_with_transformers, save_run
from support.models import ARCHITECTURES, Arch, generate
from support.vocabularies import cl100k_like, edited

from mingpt.base import command as base_command
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.data import CharTokenizer, JsonTokenizer
from mingpt.snapshot import open_snapshot
from mingpt.tools.export import export, main
from mingpt.tools.hugging_face import FORMS
from mingpt.tools.import_model import import_model
from mingpt.training.contents import make_tokenizer

CHARACTERS = "\t\n !,.?abcdefghijklmnopqrstuvwxyz\u00e9\u4e2d\U0001f600"
PROMPT = "to be,\tor \U0001f600 not\n"
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
END = "<|endoftext|>"
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}


def make_config(arch: Arch) -> Config:
    return Config(
        data=DataConfig(block_size=240),
        model=ModelConfig(arch=arch, n_layer=2, n_head=3, n_embd=24),
        optimizer=OptimizerConfig(name="adamw"),
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_what_was_exported_and_computes_the_same(arch: Arch, tmp_path: Path) -> None:
    """Logits, greedy text and tokens of characters; and the weights come back as the same bits."""
    ours = save_run(tmp_path / "run", make_config(arch), CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs, tokenizer = load_with_transformers(tmp_path / "out")
    assert type(theirs).__name__ == CLASSES[arch] and theirs.dtype == torch.float32
    encoded = tokenizer(PROMPT + CHARACTERS, return_tensors="pt")
    tokens = encoded["input_ids"]
    assert tokens[0].tolist() == [CHARACTERS.index(one) for one in PROMPT + CHARACTERS]
    assert tokenizer.decode(tokens[0]) == PROMPT + CHARACTERS and len(tokenizer) == len(CHARACTERS)
    assert tokenizer.eos_token is None and encoded.keys() == {"input_ids", "attention_mask"}
    with torch.no_grad():
        logits = ours(tokens)[0]
        assert logits is not None and logits.abs().max() > 1
        assert (theirs(tokens).logits - logits).abs().max() <= 1e-5
    found = theirs.generate(**encoded, max_new_tokens=20, do_sample=False)
    assert found[0, tokens.size(1) :].tolist() == list(generate(ours, tokens[0].tolist(), 20, temperature=0))
    import_model(str(tmp_path / "out"), str(tmp_path / "back"))
    back = open_snapshot(str(tmp_path / "back"))
    assert all(torch.equal(back.read(f"model.{name}"), weight) for name, weight in ours.named_parameters())
    its = make_tokenizer(back.manifest, back.read_tokenizer())
    assert its and its.fingerprint() == CharTokenizer(CHARACTERS).fingerprint()


def test_the_tokenizer_acts_in_transformers_as_in_the_run_and_generation_ends_at_the_end_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout, truncation, padding, a start token, or special tokens that a text names."""
    text = (ROOT / "data" / "input.txt").read_text()[:20_000]
    plain = cl100k_like(text)
    start = {"SpecialToken": {"id": END, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    bpe = JsonTokenizer(
        edited(
            plain,
            truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            padding={
                "strategy": {"Fixed": 900},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "!",
            },
            post_processor=template,
            model={**json.loads(plain)["model"], "dropout": 0.5},
        )
    )
    rows = len(bpe) + 7  # more rows than tokens
    save_run(tmp_path / "run", make_config("gpt2"), "".join(map(chr, range(0x100, 0x100 + rows))))
    monkeypatch.setattr("mingpt.tools.export.make_tokenizer", lambda *_: bpe)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs, tokenizer = load_with_transformers(tmp_path / "out")
    named = f"Enter BEATRIX, with {END} in her hand. " * 5
    for one in (text[:300], PROMPT, "na\u00efve \U0001f469\u200d\U0001f467\t\r\n  x", " ", named):
        assert tokenizer.encode(one) == bpe.encode(one).tolist()
        assert tokenizer.decode(tokenizer.encode(one)) == one
    ids = (tokenizer.eos_token_id, theirs.config.eos_token_id, theirs.generation_config.eos_token_id)
    assert ids == (0, 0, 0) and theirs.generation_config.pad_token_id == bpe.end_of_text == 0
    assert tokenizer(PROMPT).keys() == {"input_ids", "attention_mask"}
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_bytes()) == json.loads(plain)
    assert theirs.config.vocab_size == rows
    assert theirs.config.n_ctx == theirs.config.n_positions == 240  # llama.cpp's converter needs both


def test_the_command_writes_all_files_of_a_run_at_a_url_and_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README has the figures of the run."""
    out = tmp_path / "deep" / "out"
    model = save_run(tmp_path / "run", make_config("gpt2"), CHARACTERS)
    assert base_command.run_command(main, [f"file://{tmp_path}/run", str(out), "--best"]) == 0
    said = f"step 30 of file://{tmp_path}/run written to {out} as GPT2LMHeadModel\n"
    assert capsys.readouterr() == ("", said)
    assert sorted(path.name for path in out.iterdir()) == FILES
    (tmp_path / "plain").touch()  # with the modes that other files and folders are given here
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert out.stat().st_mode == out.parent.stat().st_mode
    text = (out / "README.md").read_text()
    parameters = sum(weight.numel() for weight in model.parameters())
    assert f"# GPT2LMHeadModel, {parameters:,} parameters" in text
    assert "- steps: 30\n- validation loss, nats per token: 0.5000\n" in text
    assert b"secret" not in b"".join(path.read_bytes() for path in out.iterdir())


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that the command, run in this process, ends with."""
    assert base_command.run_command(main, [str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    return shown.err


def test_a_folder_stays_as_it_is_and_keeps_its_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the working directory, and on a disk that refuses chmod."""
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, make_config("modern"), CHARACTERS)
    (out / "lost+found").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    out.chmod(0o2750)
    monkeypatch.chdir(out)
    monkeypatch.setattr("shutil.copymode", Mock(side_effect=PermissionError))
    before = out.stat()
    export(str(run), ".")
    assert (out.stat().st_ino, out.stat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in Path().iterdir()) == sorted([*FILES, "lost+found", "notes.txt"])
    assert (out / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_no_model_and_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, make_config("gpt2"), CHARACTERS)
    save_run(tmp_path / "other", make_config("modern"), CHARACTERS)
    monkeypatch.delitem(FORMS, "modern")  # as an architecture of a user's own
    (tmp_path / "file").touch()
    there = ("README.md", "tokenizer.json", "special_tokens_map.json")
    for name in there:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")
    attempts: list[tuple[list[object], str]] = [
        ([run], "the following arguments are required: OUT_DIR; see python -m mingpt export --help"),
        (
            [tmp_path / "other", out],
            "model.arch=modern cannot be written in Hugging Face's format; sample.py",
        ),
        ([run, tmp_path / "file"], f"cannot be written: {tmp_path / 'file'} is not a folder"),
        ([run, tmp_path / "file" / "out"], f"cannot be written: {tmp_path / 'file'} is not a folder"),
        ([run, "s3://name:secret@host/out"], "is no folder on a disk of this machine: export to one"),
        ([tmp_path / "none", out], "there is no snapshot in"),
        *(
            (
                ["no/run", tmp_path / name],
                f"/{name} is there already, and would be taken for a part of the model",
            )
            for name in there
        ),
    ]
    for words, sentence in attempts:
        line = refusal(capsys, *words)
        assert sentence in line and "secret" not in line

    FaultyDisk(monkeypatch, "rename", "/model.safetensors")
    assert "cannot be written: No space left on device" in refusal(capsys, run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", "other", "out", "run", *there])
    assert all(os.listdir(tmp_path / name) == [name] for name in there)
    assert "config.json" not in os.listdir(out)
