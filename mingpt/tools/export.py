"""Write a run as a folder in Hugging Face's format: python -m mingpt export out/default OUT_DIR.

`model.arch: gpt2` becomes transformers' GPT2LMHeadModel, `modern` its NanoChatForCausalLM. RUN and OUT_DIR
may be paths or URLs. A folder appears whole or not at all; at a URL, config.json is written last.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mingpt.base.command import CommandParser
from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, fsync_path
from mingpt.base.urls import open_url, redact
from mingpt.config import flatten, settings

if TYPE_CHECKING:
    from mingpt.data import Tokenizer
    from mingpt.snapshot import Snapshot

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {architecture}, {parameters:,} parameters

Trained by mingpt-distributed with `model.arch: {arch}`.

| | |
|---|---|
{rows}

## Load it

With transformers, and none of its remote code:

```python
{code}
```

{tokenizer}

With mingpt-distributed, to go on from these weights:

```bash
python train.py snapshot.init_from=FOLDER {model}
```

## How it was trained

By these settings; the others cannot change the result.

```yaml
{settings}```
"""
WITH_TOKENIZER = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer({prompt!r}, return_tensors="pt")
room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=min({tokens}, room))[0]))"""
WITHOUT_TOKENIZER = """\
import torch
from transformers import AutoModelForCausalLM

folder = "."  # the folder of this file
model = AutoModelForCausalLM.from_pretrained(folder)
room = model.config.max_position_embeddings - 1
print(model.generate(torch.tensor([[0]]), max_new_tokens=min({tokens}, room))[0].tolist())"""
EXAMPLE_TOKENS = 200  # at most
# That GPT's shape depends on, and whose defaults another run need not have.
MODEL_SETTINGS = ("model.arch", "model.n_layer", "model.n_head", "model.n_embd", "data.block_size")
NAMES = {
    "train/loss": "training loss, nats per token",
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation, bits per byte",
}
CONFIG, WEIGHTS, TOKENIZER, README = "config.json", "model.safetensors", "tokenizer.json", "README.md"
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
FILES = (WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, README, CONFIG)  # config.json is the last


def model_card(manifest: Mapping[str, Any], architecture: str, parameters: int, prompt: str | None) -> str:
    """The card as Markdown, of a run with this manifest.

    `parameters` counts a matrix once that is used twice, `prompt` is what the example continues; without a
    tokenizer, it is None.
    """
    config = manifest["config"]
    figures: dict[str, Any] = {
        "parameters": f"{parameters:,}",
        "steps": f"{manifest['step']:,}",
        "tokens trained on": f"{manifest['windows'] * config['data']['block_size']:,}",
        "context length": f"{config['data']['block_size']:,}",
    }
    for record in manifest["metrics"].values():
        figures |= {
            f"{NAMES[name]}, at step {record['step']:,}": f"{value:.4f}"
            for name, value in record.items()
            if name in NAMES
        }
    figures |= {"data": quoted(manifest["data"]["path"]), "data, SHA-256": quoted(manifest["data"]["sha256"])}
    figures |= {"snapshot, SHA-256": quoted(manifest["sha256"])}
    figures |= {"software": quoted(", ".join(f"{key} {one}" for key, one in manifest["software"].items()))}
    code = WITHOUT_TOKENIZER if prompt is None else WITH_TOKENIZER
    tokenizer = (
        "There is no tokenizer here: the run had none, or one that no `tokenizer.json` can describe."
        if prompt is None
        else "`tokenizer.json` is the tokenizer that it was trained with."
    )
    given = flatten(dict(config))
    return CARD.format(
        model=" ".join(f"{key}={given[key]}" for key in MODEL_SETTINGS),
        architecture=architecture,
        parameters=parameters,
        arch=config["model"]["arch"],
        rows="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        code=code.format(prompt=prompt, tokens=EXAMPLE_TOKENS),
        tokenizer=tokenizer,
        settings=yaml.safe_dump(result_settings(config), sort_keys=False).replace("```", "'''"),
    )


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """{key: value} of the settings that can change the result, URLs without credentials."""
    given = flatten(dict(config))
    found = {
        key: given[key] for key, setting in settings().items() if setting.affects_result and key in given
    }
    return {key: redact(value) if isinstance(value, str) else value for key, value in found.items()}


def quoted(text: str) -> str:
    """One line of code in a cell of a table; URLs without credentials."""
    plain = " ".join(redact(text).split())
    return "`" + plain.replace("`", "'").replace("|", "\\|") + "`"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt export", __doc__)
    where = "run folder, snapshot folder, or step_*.safetensors; a path or URL"
    parser.add_argument("run", metavar="RUN", help=where)
    parser.add_argument("out", metavar="OUT_DIR", help="folder to write; a path or URL")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier export has written")
    options = parser.parse_args(arguments)
    sys.stderr.write(redact(export(options.run, options.out, options.overwrite)) + "\n")
    return 0


def export(run: str, out: str, overwrite: bool = False) -> str:
    """Write the newest snapshot of a run, or this one; returns lines that say so. Raises UserError."""
    target = Target(out, overwrite)
    from mingpt.snapshot import open_snapshot
    from mingpt.training.state import check_model, snapshot_tokenizer

    snapshot = open_snapshot(run, check_model, weights_only=True)
    with target.open() as folder:
        architecture = write_files(folder, snapshot, snapshot_tokenizer(snapshot))
        has_tokenizer = (folder / TOKENIZER).exists()
    line = f"step {snapshot.manifest['step']} of {run} written to {out} as {architecture}"
    none = "the run has none, or one that no tokenizer.json can describe"
    return line if has_tokenizer else f"{line}\nwithout a tokenizer: {none}"


def write_files(folder: Path, snapshot: "Snapshot", tokenizer: "Tokenizer | None") -> str:
    """Write all files into a folder that is there; returns the name of transformers' class."""
    from safetensors.torch import save_file

    from mingpt.model import hf_config, to_hf

    config, tensors = snapshot.config, snapshot.tensors("model.")
    block_size, vocab_size = config.data.block_size, len(tensors["wte.weight"])
    content = tokenizer.to_tokenizer_json() if tokenizer else None
    end = tokenizer.end_of_text if tokenizer and content else None
    fields = hf_config(config.model, vocab_size=vocab_size, block_size=block_size, end_of_text=end)
    write_json(folder / CONFIG, fields)
    save_file(to_hf(tensors, config.model), folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # save_file lets nobody else read it
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(folder / GENERATION_CONFIG, special)
    prompt = None
    if tokenizer and content:
        prompt = example_prompt(tokenizer, block_size)
        (folder / TOKENIZER).write_bytes(content)
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(content, block_size, end))
    architecture: str = fields["architectures"][0]
    parameters = sum(tensor.numel() for tensor in tensors.values())
    card = model_card(snapshot.manifest, architecture, parameters, prompt)
    (folder / README).write_text(card, encoding="utf-8")
    return architecture


def example_prompt(tokenizer: "Tokenizer", block_size: int) -> str:
    """The text that the README's example continues, short enough to leave room for what comes after it."""
    text = tokenizer.decode(tokenizer.default_prompt()) or "The"
    return tokenizer.decode(tokenizer.encode(text)[: max(1, block_size - 1)].tolist())


def tokenizer_config(content: bytes, block_size: int, end: int | None) -> dict[str, Any]:
    """The content of tokenizer_config.json, for a tokenizer.json and its token that ends a text."""
    added = {one["id"]: one["content"] for one in json.loads(content).get("added_tokens") or []}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        # No token_type_ids, to which versions before 5 default: GPT2LMHeadModel would add their embeddings.
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": added.get(end),
        "eos_token": added.get(end),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Target:
    """Where to write. Raises UserError if it is not empty, or if an export has not written all of it."""

    def __init__(self, where: str, overwrite: bool) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.where = where
        self.files, root = open_url(where)
        self.is_local = isinstance(self.files, LocalFileSystem)
        self.root = os.path.realpath(root) if self.is_local else root.rstrip("/")
        with self.failures():
            self.present = self.names()
        if self.present and not overwrite:
            raise UserError(f"{where} is not empty: give another folder, or --overwrite")
        others = sorted(set(self.present) - set(FILES))
        if others:
            raise UserError(f"{where} holds {others[0]!r}, which no export has written: give another folder")

    def names(self) -> list[str]:
        """What is there."""
        try:
            entries: Sequence[Any] = self.files.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        if self.is_local and not os.path.isdir(self.root):
            raise NotADirectoryError(20, "it is a file", self.where)
        return sorted(name for name in (str(one).rstrip("/").rpartition("/")[2] for one in entries) if name)

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """A failure of a disk or a driver as one sentence."""
        try:
            yield
        except UserError:
            raise
        except DriverError as error:
            if self.is_local and not isinstance(error, OSError):
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(f"{self.where} cannot be written: {type(error).__name__}: {reason}") from None

    @contextlib.contextmanager
    def open(self) -> Iterator[Path]:
        """An empty local folder, whose files are at the target once the block has ended without an error."""
        with self.failures(), self.local_folder() as folder:
            yield folder
            if self.is_local:
                self.rename(folder)
            else:
                self.upload(folder)

    @contextlib.contextmanager
    def local_folder(self) -> Iterator[Path]:
        """Beside the target, so that it can be renamed; anywhere for a URL. Nothing is left of it."""
        if not self.is_local:
            with tempfile.TemporaryDirectory() as name:
                yield Path(name)
            return
        target = Path(self.root)
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def rename(self, folder: Path) -> None:
        """Put the folder in its place, durably."""
        for path in (*folder.iterdir(), folder):
            fsync_path(path)
        target = Path(self.root)
        if not self.present:
            os.rename(folder, target)  # an empty folder there is replaced
        else:
            old = target.with_name(f".{target.name}.old-{os.getpid()}")
            os.rename(target, old)
            os.rename(folder, target)
            shutil.rmtree(old)
        fsync_path(target.parent)

    def upload(self, folder: Path) -> None:
        """Without its config.json nobody takes an incomplete folder for a model."""
        for name in reversed(FILES):
            if name in self.present:
                self.files.rm_file(f"{self.root}/{name}")
        self.files.makedirs(self.root, exist_ok=True)
        for name in FILES:
            if (folder / name).exists():
                self.files.put_file(str(folder / name), f"{self.root}/{name}")
                size, expected = self.files.size(f"{self.root}/{name}"), (folder / name).stat().st_size
                if size != expected:
                    raise OSError(f"{name} has {size} bytes of {expected} after writing")
