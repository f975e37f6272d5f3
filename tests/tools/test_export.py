import json
import logging
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import ROOT
from support.hf_models import save_run
from support.models import ARCHITECTURES, Arch
from support.object_store import object_store
from support.vocabularies import cl100k_like

from mingpt.base import command as base_command
from mingpt.base.errors import UserError
from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.config.cli import parse
from mingpt.data import JsonTokenizer
from mingpt.model import GPT, generate
from mingpt.snapshot import open_snapshot
from mingpt.tools.export import FILES, export, main, write_files
from mingpt.tools.jobs import free_port
from mingpt.training.initial_weights import read_folder

CHARACTERS = "\t\n !,.?abcdefghijklmnopqrstuvwxyz\u00e9\u4e2d\U0001f600"
PROMPT = "to be,\tor \U0001f600 not\n"
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}


def make_config(arch: Arch, n_head: int = 2, block_size: int = 240) -> Config:
    return Config(
        data=DataConfig(block_size=block_size),
        model=ModelConfig(arch=arch, n_layer=2, n_head=n_head, n_embd=24),
        optimizer=OptimizerConfig(name="adamw"),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to share, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What transformers logs meanwhile, at the level of a warning or above."""
    pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    from transformers.utils import logging as their_logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    kept: list[str] = []
    handler = Keep(logging.WARNING)
    their_logging.add_handler(handler)
    yield kept
    their_logging.remove_handler(handler)


def load_with_transformers(folder: Path) -> Any:
    """By the automatic class, without remote code, and with nothing missing or left over."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM  # with its information, it returns a pair
    model, info = loader.from_pretrained(folder, trust_remote_code=False, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


@pytest.mark.parametrize("n_head", [1, 3])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_what_was_exported_and_computes_the_same(
    arch: Arch, n_head: int, messages: list[str], tmp_path: Path
) -> None:
    """Logits within 1e-4, and greedy text of 200 tokens up to the first step at which two tokens are even."""
    ours = save_run(tmp_path / "run", make_config(arch, n_head), CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs = load_with_transformers(tmp_path / "out")
    assert type(theirs).__name__ == CLASSES[arch] and theirs.dtype == torch.float32
    tokens = torch.randint(0, len(CHARACTERS), (2, 240), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours(tokens)[0]
        assert logits is not None and logits.abs().max() > 1
        assert (theirs(tokens).logits - logits).abs().max() <= 1e-4
    prompt = tokens[:1, :20]
    expected = list(generate(ours, prompt[0].tolist(), 200, temperature=0))
    found = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False
    )
    assert messages == []
    assert_same_greedy_text(ours, prompt[0].tolist(), expected, found[0, 20:].tolist())


def assert_same_greedy_text(model: GPT, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Up to the first step whose two best logits differ by less than 1e-4."""
    assert len(ours) == len(theirs) == 200
    if ours == theirs:
        return
    first = next(number for number, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours[:first]]))[0]
    assert logits is not None
    best = logits[0, -1].topk(2).values
    assert best[0] - best[1] < 1e-4, f"other tokens from {first} on"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_out_and_in_again_the_tensors_are_the_same_bits(arch: Arch, tmp_path: Path) -> None:
    config = make_config(arch, n_head=3)
    model = save_run(tmp_path / "run", config, CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    found = read_folder(str(tmp_path / "out"))
    assert found.model.config == config.model
    assert (found.model.vocab_size, found.model.block_size) == (len(CHARACTERS), 240)
    weights = dict(model.named_parameters())
    assert found.tensors.keys() == weights.keys()
    assert all(torch.equal(found.tensors[name], weight) for name, weight in weights.items())
    assert found.tokenizer_json == (tmp_path / "out" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_characters_round_trip_through_the_tokenizer_of_transformers(
    arch: Arch, messages: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_run(tmp_path / "run", make_config(arch), CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    encoded = tokenizer(PROMPT + CHARACTERS)
    assert encoded["input_ids"] == [CHARACTERS.index(one) for one in PROMPT + CHARACTERS]
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(encoded["input_ids"]) == PROMPT + CHARACTERS
    assert len(tokenizer) == len(CHARACTERS) and tokenizer.eos_token is None
    assert messages == []


def export_with(tokenizer: JsonTokenizer | None, run: Path, out: Path) -> Path:
    """As `export`, for a run with this tokenizer."""
    out.mkdir()
    write_files(out, open_snapshot(str(run)), tokenizer)
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_byte_level_bpe_round_trips_and_generation_ends_at_the_end_of_text(
    arch: Arch, messages: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    text = (ROOT / "data" / "input.txt").read_text()[:20_000]
    bpe = JsonTokenizer(cl100k_like(text))
    padded = "".join(map(chr, range(0x100, 0x100 + len(bpe) + 7)))  # more rows than tokens
    model = save_run(tmp_path / "run", make_config(arch), padded)
    out = export_with(bpe, tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    for one in (text[:300], PROMPT, "na\u00efve \U0001f469\u200d\U0001f469\u200d\U0001f467\t\r\n  x", " "):
        assert tokenizer.encode(one) == bpe.encode(one).tolist()
        assert tokenizer.decode(tokenizer.encode(one)) == one
    theirs, end = load_with_transformers(out), bpe.end_of_text
    assert end is not None and tokenizer.eos_token_id == theirs.generation_config.eos_token_id == end
    assert theirs.config.vocab_size == len(bpe) + 7
    prompt = tokenizer(PROMPT, return_tensors="pt")
    logits = model(prompt["input_ids"])[0]
    assert logits is not None
    assert (theirs(**prompt).logits - logits).abs().max() <= 1e-4  # no token_type_ids

    def force_end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([end]), 1e9) if ids.size(1) == length + 5 else scores

    length = prompt["input_ids"].size(1)
    generated = theirs.generate(**prompt, max_new_tokens=50, do_sample=False, logits_processor=[force_end])
    assert generated.size(1) == length + 6 and generated[0, -1] == end
    assert messages == []


def test_without_a_tokenizer_there_are_no_files_of_one_and_the_readme_says_so(
    tmp_path: Path,
) -> None:
    save_run(tmp_path / "run", make_config("modern"), CHARACTERS)
    out = export_with(None, tmp_path / "run", tmp_path / "out")
    assert not list(out.glob("tokenizer*"))
    assert "There is no tokenizer here" in (out / "README.md").read_text()
    fields = json.loads((out / "config.json").read_text())
    assert fields["eos_token_id"] is fields["bos_token_id"] is fields["pad_token_id"] is None


def code_of(folder: Path) -> str:
    """The README's Python code."""
    text = (folder / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(code)


def run_readme(folder: Path) -> str:
    """What that code prints, run as it stands."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code_of(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_readme_has_the_figures_of_the_run_and_its_code_runs(tmp_path: Path) -> None:
    model = save_run(tmp_path / "run", make_config("gpt2"), CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text()
    parameters = sum(weight.numel() for weight in model.parameters())
    assert f"# GPT2LMHeadModel, {parameters:,} parameters" in text
    assert "| steps | 30 |" in text and f"| tokens trained on | {30 * 8 * 240:,} |" in text
    assert "| validation loss, nats per token, at step 30 | 0.5000 |" in text
    assert "| data | `https://name:***@host/data.txt?***` |" in text
    assert "torch 2.13.0" in text and "model.n_embd: 24" in text and "run_dir" not in text
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert b"secret" not in written
    assert len(run_readme(tmp_path / "out")) >= 200
    plain = export_with(None, tmp_path / "run", tmp_path / "plain")
    assert run_readme(plain).startswith("[0, ")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_code_of_the_readme_stays_within_a_short_context(
    arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bpe = JsonTokenizer(cl100k_like("ab"))  # the example's prompt takes three tokens
    rows = "".join(map(chr, range(0x100, 0x100 + len(bpe))))
    for block_size in (2, 4, 8):
        run = tmp_path / f"run-{block_size}"
        save_run(run, make_config(arch, block_size=block_size), rows)
        for tokenizer in (bpe, None):
            out = export_with(tokenizer, run, tmp_path / f"out-{block_size}-{tokenizer is None}")
            monkeypatch.chdir(out)
            exec(code_of(out), {})
            printed = capsys.readouterr().out
            assert printed.startswith("T") if tokenizer else len(json.loads(printed)) == block_size


def test_the_command_of_the_readme_gives_the_shape_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    save_run(tmp_path / "run", make_config("gpt2", n_head=3, block_size=16), CHARACTERS)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    (line,) = re.findall(
        r"^```bash\npython train.py (.*)\n```$", (tmp_path / "out" / "README.md").read_text(), re.MULTILINE
    )
    config = parse([word.replace("FOLDER", str(tmp_path / "out")) for word in line.split()])
    model = read_folder(str(tmp_path / "out")).model
    assert (config.model, config.data.block_size) == (model.config, model.block_size)
    assert config.snapshot.init_from == str(tmp_path / "out")


def run_command(*words: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, in which `code` runs first."""
    program = f"import os, runpy\n{code}\nrunpy.run_module('mingpt', run_name='__main__')"
    line = [sys.executable, "-c", program, "export", *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that the command, run in this process, ends with."""
    assert base_command.run_command(main, [str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    return shown.err


def test_the_command_writes_all_files_and_says_so_in_one_line(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "deep" / "out"
    save_run(run, make_config("modern"), CHARACTERS)
    done = run_command(run, out, code="os.umask(0o022)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == f"step 30 of {run} written to {out} as NanoChatForCausalLM\n"
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644}
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


def test_an_export_without_a_tokenizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path / "run", make_config("modern"), CHARACTERS)
    monkeypatch.setattr("mingpt.training.state.snapshot_tokenizer", lambda snapshot: None)
    line, more = export(str(tmp_path / "run"), str(tmp_path / "out")).splitlines()
    assert line.endswith("as NanoChatForCausalLM") and more.startswith("without a tokenizer: ")


def test_wrong_arguments_and_a_folder_of_hugging_face_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "error: the following arguments are required: OUT_DIR; see python -m mingpt export --help\n"
    assert refusal(capsys, tmp_path / "run") == expected
    assert "unrecognized arguments: --nonsense" in refusal(capsys, "run", "out", "--nonsense")
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, make_config("modern"), CHARACTERS)
    export(str(run), str(out))
    line = refusal(capsys, out, tmp_path / "again")
    assert line.startswith(f"error: {out} is a folder in Hugging Face's format and no run")
    save_run("memory://export_hf/run", make_config("modern"), CHARACTERS)
    export("memory://export_hf/run", "memory://export_hf/out")
    assert "is a folder in Hugging Face's format" in refusal(capsys, "memory://export_hf/out", out / "again")


def test_only_what_an_export_has_written_is_overwritten_and_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "there" / "out"
    save_run(run, make_config("modern"), CHARACTERS)
    out.mkdir(parents=True)  # an empty folder will do
    export(str(run), str(out))
    before = (out / "README.md").read_bytes()
    assert refusal(capsys, run, out) == f"error: {out} is not empty: give another folder, or --overwrite\n"
    (out / "README.md").write_text("mine")
    export(str(run), str(out), overwrite=True)
    assert (out / "README.md").read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (out / "thesis.tex").touch()
    line = refusal(capsys, run, out, "--overwrite")
    assert line.startswith(f"error: {out} holds 'thesis.tex', which no export has written")
    assert len(list(out.iterdir())) == len(FILES) + 1


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_that_is_killed_leaves_nothing_half_done(overwrite: bool, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, make_config("gpt2"), CHARACTERS)
    if overwrite:
        export(str(run), str(out))
        (out / "README.md").write_text("the old one")
    kill = "os.rename = lambda *paths: os.kill(os.getpid(), 9)"
    words: list[object] = [run, out, "--overwrite"] if overwrite else [run, out]
    killed = run_command(*words, code=kill)
    assert killed.returncode == -9
    assert out.exists() == overwrite
    if overwrite:
        assert (out / "README.md").read_text() == "the old one"
        read_folder(str(out))
    export(str(run), str(out), overwrite)
    assert "## How it was trained" in (out / "README.md").read_text()
    read_folder(str(out))


def test_a_failure_leaves_nothing_and_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, make_config("gpt2"), CHARACTERS)
    (tmp_path / "file").touch()
    attempts: list[tuple[list[object], str]] = [
        ([run, tmp_path / "file"], "it is a file"),
        ([run, tmp_path / "file" / "out"], "cannot be written: NotADirectoryError"),
        ([run, "nosuch://bucket/out"], "needs a driver that is not installed"),
        ([run, f"http://name:secret@127.0.0.1:{free_port()}/out"], "cannot be written"),
        ([tmp_path / "none", out], "there is no snapshot in"),
    ]
    for words, sentence in attempts:
        line = refusal(capsys, *words)
        assert sentence in line and "secret" not in line

    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mingpt.tools.export.fsync_path", fail)
    assert "cannot be written: OSError: [Errno 28] No space left on device" in refusal(capsys, run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_run_at_a_url_is_exported_to_a_url(tmp_path: Path) -> None:
    model = save_run("memory://export_test/run", make_config("modern"), CHARACTERS)
    out = "memory://export_test/out"
    line = export("memory://export_test/run", out)
    assert line == f"step 30 of memory://export_test/run written to {out} as NanoChatForCausalLM"
    memory = fsspec.filesystem("memory")
    names = {path.rpartition("/")[2] for path in memory.ls("/export_test/out", detail=False)}
    assert names == set(FILES)
    found = read_folder(out)
    assert all(torch.equal(found.tensors[name], one) for name, one in model.named_parameters())
    with pytest.raises(UserError, match="is not empty"):
        export("memory://export_test/run", out)
    export("memory://export_test/run/snapshots/step_00000030.json", out, overwrite=True)
    assert read_folder(out).config == found.config


def test_an_upload_that_breaks_off_has_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    save_run("memory://export_break/run", make_config("gpt2"), CHARACTERS)
    export("memory://export_break/run", "memory://export_break/out")
    memory = fsspec.filesystem("memory")
    put_file = type(memory).put_file

    def fail(self: Any, here: str, there: str, **options: Any) -> None:
        if there.endswith("README.md"):
            raise OSError("the connection is lost")
        put_file(self, here, there, **options)

    monkeypatch.setattr(type(memory), "put_file", fail)
    with pytest.raises(UserError, match="cannot be written: OSError: the connection is lost"):
        export("memory://export_break/run", "memory://export_break/out", overwrite=True)
    assert memory.exists("/export_break/out/model.safetensors")
    with pytest.raises(UserError, match=r"there is no config\.json"):
        read_folder("memory://export_break/out")


@pytest.mark.slow
def test_an_object_store_takes_an_export_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(monkeypatch) as files:
        files.mkdir("models")
        model = save_run(tmp_path / "run", make_config("modern"), CHARACTERS)
        done = run_command(tmp_path / "run", "s3://models/one")
        assert done.returncode == 0, done.stderr
        again = run_command(tmp_path / "run", "s3://models/one")
        assert again.returncode == 2 and "s3://models/one is not empty" in again.stderr
        replaced = run_command(tmp_path / "run", "s3://models/one", "--overwrite")
        assert replaced.returncode == 0, replaced.stderr
        found = read_folder("s3://models/one")
        assert all(torch.equal(found.tensors[name], one) for name, one in model.named_parameters())
