import json
from pathlib import Path

import pytest
import torch
from support.commands import refused, run_here
from support.faults import FaultyDisk
from support.golden import Golden
from support.hf_models import load_with_transformers, save_run
from support.jobs import ROOT, contents
from support.models import ARCHITECTURES, Arch, generate
from support.vocabularies import cl100k_like, edited

from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.data import CharTokenizer, JsonTokenizer
from mingpt.model import GPT
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
NAMES_END = f"Enter BEATRIX, with {END} in her hand. "
PADDING = {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "!"}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}


def save(folder: Path, arch: Arch, characters: str = CHARACTERS) -> GPT:
    model = ModelConfig(arch=arch, n_layer=2, n_head=3, n_embd=24)
    data, optimizer = DataConfig(block_size=240), OptimizerConfig(name="adamw")
    return save_run(folder, Config(data=data, model=model, optimizer=optimizer), characters)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_transformers_loads_what_was_exported_and_computes_the_same(arch: Arch, tmp_path: Path) -> None:
    """Logits, greedy text and tokens of characters; and the weights come back as the same bits."""
    ours = save(tmp_path / "run", arch)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs, tokenizer = load_with_transformers(tmp_path / "out")
    assert type(theirs).__name__ == CLASSES[arch] and theirs.dtype == torch.float32
    encoded = tokenizer(PROMPT + CHARACTERS, return_tensors="pt")
    tokens = encoded["input_ids"]
    assert tokens[0].tolist() == [CHARACTERS.index(one) for one in PROMPT + CHARACTERS]
    assert tokenizer.decode(tokens[0]) == PROMPT + CHARACTERS and len(tokenizer) == len(CHARACTERS)
    assert tokenizer.eos_token is None and encoded.keys() == {"input_ids", "attention_mask"}
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
    text = (ROOT / "data" / "input.txt").read_text()[:20_000]
    plain = cl100k_like(text)
    # Other programs obey these, and training does not.
    bpe = JsonTokenizer(edited(plain, truncation=TRUNCATION, padding=PADDING))
    rows = len(bpe) + 7  # more rows than tokens
    save(tmp_path / "run", "gpt2", "".join(map(chr, range(0x100, 0x100 + rows))))
    monkeypatch.setattr("mingpt.tools.export.make_tokenizer", lambda *_: bpe)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs, tokenizer = load_with_transformers(tmp_path / "out")
    for one in (text[:300], PROMPT, "na\u00efve \U0001f469\u200d\U0001f467\t\r\n  x", " ", 5 * NAMES_END):
        assert tokenizer.encode(one) == bpe.encode(one).tolist()
        assert tokenizer.decode(tokenizer.encode(one)) == one
    ids = (tokenizer.eos_token_id, theirs.config.eos_token_id, theirs.generation_config.eos_token_id)
    assert ids == (0, 0, 0) and theirs.generation_config.pad_token_id == bpe.end_of_text == 0
    assert tokenizer(PROMPT).keys() == {"input_ids", "attention_mask"}
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_bytes()) == json.loads(plain)
    assert theirs.config.vocab_size == rows
    assert theirs.config.n_ctx == theirs.config.n_positions == 240  # llama.cpp's converter needs both


def test_the_command_adds_all_files_of_a_run_at_a_url_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder, here the working directory, and its other files stay as they are."""
    save(tmp_path / "run", "gpt2")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    monkeypatch.chdir(out)
    done = run_here(main, f"file://{tmp_path}/run", ".", "--best")
    said = f"step 30 of file://{tmp_path}/run written to . as GPT2LMHeadModel\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "notes.txt"])
    assert b"secret" not in b"".join(path.read_bytes() for path in out.iterdir())


@pytest.mark.parametrize(
    ("run", "out"),
    [
        ("other", "out"),
        ("run", "file"),
        ("run", "s3://name:secret@host/out"),
        ("missing", "out"),
        ("missing", "README.md"),
        ("run", "full"),
    ],
)
def test_a_failure_leaves_no_model_and_is_one_sentence(
    run: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A folder with a file of that name, a disk that is full, and an architecture of a user's own."""
    save(tmp_path / "run", "gpt2")
    save(tmp_path / "other", "modern")
    monkeypatch.delitem(FORMS, "modern")
    monkeypatch.chdir(tmp_path)
    FaultyDisk(monkeypatch, "rename", "/model.safetensors")
    (tmp_path / "file").touch()
    if out == "README.md":
        (tmp_path / out).mkdir()
        (tmp_path / out / out).write_text("mine")
    before = contents(tmp_path)
    golden(refused(main, run, *filter(None, [out])))
    after = contents(tmp_path)
    assert before.items() <= after.items()
    left = {path.name for path in after.keys() - before.keys()}
    assert not left & {"config.json", "model.safetensors"}
