"""Write a run's newest or best snapshot in Hugging Face's format: python -m mingpt export RUN OUT_DIR.

RUN is the path or URL of a run, such as out/default, or of a snapshot. A model with `model.arch: gpt2`
becomes a GPT2LMHeadModel of transformers, and a model with `model.arch: modern` becomes a
NanoChatForCausalLM. OUT_DIR may hold other files, but none that transformers would take for a part of the
model. The files appear in OUT_DIR, config.json last, only when all of them are complete. If the command was
killed, remove the folder .mingpt-export-* in OUT_DIR.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from mingpt.base.command import CommandParser
from mingpt.base.errors import UserError
from mingpt.base.files import fsync_path
from mingpt.base.paths import describe_obstacle, typed_path
from mingpt.base.urls import redact, redact_all
from mingpt.config import Config, flatten, result_settings
from mingpt.data import Tokenizer
from mingpt.model.hf import convertible, hf_fields, import_transformers, to_hf
from mingpt.snapshot import Manifest, Snapshot, open_snapshot
from mingpt.snapshot.contents import check_model, snapshot_tokenizer

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

With transformers, without remote code:

{code}

With mingpt-distributed, to go on from these weights:

```bash
python train.py snapshot.init_from=FOLDER {model}
```

## How it was trained

With these settings; the others cannot change the result.

```yaml
{settings}```
"""
WITH_TOKENIZER = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer({prompt!r}, return_tensors="pt")
room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=min({tokens}, room))[0]))
```

`tokenizer.json` is the tokenizer that it was trained with."""
WITHOUT_TOKENIZER = """\
```python
import torch
from transformers import AutoModelForCausalLM

folder = "."  # the folder of this file
model = AutoModelForCausalLM.from_pretrained(folder)
room = model.config.max_position_embeddings - 1
print(model.generate(torch.tensor([[0]]), max_new_tokens=min({tokens}, room))[0].tolist())
```

There is no tokenizer here: the run had none, or one that no `tokenizer.json` can describe."""
EXAMPLE_TOKENS = 200  # the most tokens that the card's example generates
# The settings on which the weights' shapes depend. The model card gives them all: defaults may be different.
MODEL_SETTINGS = ("model.arch", "model.n_layer", "model.n_head", "model.n_embd", "data.block_size")
CONFIG = "config.json"  # without it the folder is no model
WRITTEN = (
    CONFIG,
    "README.md",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
# What transformers also reads, if it is there.
READ = ("adapter_config.json", "added_tokens.json", "chat_template.jinja", "special_tokens_map.json")
NAMES = {
    "train/loss": "training loss, nats per token",
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation, bits per byte",
}


def model_card(manifest: Manifest, architecture: str, parameters: int, prompt: str | None) -> str:
    """Return the model card, as Markdown, of the snapshot with this manifest.

    `architecture` is the name of the model class in transformers. `parameters` is the number of parameters;
    a matrix that is used twice counts once. `prompt` is the text that the card's example continues; None if
    there is no tokenizer.json.
    """
    given, software = flatten(dict(manifest.config)), manifest.software.model_dump(exclude_unset=True)
    figures: dict[str, Any] = {
        "steps": f"{manifest.step:,}",
        "tokens trained on": f"{manifest.windows * given['data.block_size']:,}",
        "context length": f"{given['data.block_size']:,}",
    }
    for record in manifest.metrics.values():
        figures |= {
            f"{NAMES[name]}, at step {record['step']:,}": f"{value:.4f}"
            for name, value in record.items()
            if name in NAMES
        }
    figures |= {
        "data": quoted(manifest.data.path),
        "data, SHA-256": quoted(manifest.data.sha256),
        "snapshot, SHA-256": quoted(manifest.sha256),
        "software": quoted(", ".join(f"{key} {one}" for key, one in software.items())),
    }
    trained = yaml.safe_dump(redact_all(result_settings(manifest.config)), sort_keys=False)
    code = WITHOUT_TOKENIZER if prompt is None else WITH_TOKENIZER
    return CARD.format(
        model=" ".join(f"{key}={given[key]}" for key in MODEL_SETTINGS),
        architecture=architecture,
        parameters=parameters,
        arch=given["model.arch"],
        rows="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        code=code.format(prompt=prompt, tokens=EXAMPLE_TOKENS),
        settings=trained.replace("```", "'''"),
    )


def quoted(text: str) -> str:
    """Return `text` as code for a cell of a Markdown table: on one line, with credentials in URLs hidden."""
    plain = " ".join(redact(text).split())
    return "`" + plain.replace("`", "'").replace("|", "\\|") + "`"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt export", __doc__)
    where = "run folder, snapshot folder, or step_*.safetensors; a path or URL"
    parser.add_argument("run", type=typed_path, metavar="RUN", help=where)
    parser.add_argument("out", type=typed_path, metavar="OUT_DIR", help="folder to write")
    parser.add_argument("--best", action="store_true", help="the snapshot with the lowest validation loss")
    options = parser.parse_args(arguments)
    sys.stderr.write(redact(export(options.run, options.out, options.best)) + "\n")
    return 0


def export(run: str, out: str, best: bool = False) -> str:
    """Write a snapshot to the folder `out` in Hugging Face's format.

    `run` is the path or URL of a snapshot, or of a run: then the newest usable snapshot is written, or with
    `best` the one with the lowest validation loss. Returns a line that says what was written, and a second
    line if no tokenizer was written. The files appear in `out`, config.json last, only when all of them are
    on disk. Raises UserError if `out` is a URL, cannot be written, or holds a file of the same name or
    another that transformers would read. Also raises UserError if no snapshot can be used or converted, if
    `best` is given with a snapshot, or if transformers is missing.
    """
    if "://" in out:
        raise UserError(f"{out} is no folder on a disk of this machine: export to one, and copy it")
    target = Path(out).absolute()
    try:
        target.mkdir(parents=True, exist_ok=True)
        refuse_files(target)
        # Inside the target, which may be a mount or lie in a folder that nobody may write.
        with tempfile.TemporaryDirectory(
            prefix=".mingpt-export-", dir=target, ignore_cleanup_errors=True
        ) as partial:
            snapshot = open_snapshot(run, check_model, weights_only=True, best=best)
            architecture = write_files(Path(partial), snapshot, snapshot_tokenizer(snapshot))
            has_tokenizer = (Path(partial) / "tokenizer.json").exists()
            move_files(Path(partial), target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {describe_obstacle(target, error)}") from None
    line = f"step {snapshot.manifest.step} of {run} written to {out} as {architecture}"
    return (
        line
        if has_tokenizer
        else (f"{line}\nwithout a tokenizer: the run has none, or one that no tokenizer.json can describe")
    )


def refuse_files(folder: Path) -> None:
    """Raise UserError if the folder holds a file to be overwritten, or another that transformers reads."""
    for name in (*WRITTEN, *READ):
        if os.path.lexists(folder / name):
            raise UserError(
                f"{folder / name} is there already, and would be taken for a part of the model: give another "
                "folder, or move the file away"
            )


def move_files(partial: Path, target: Path) -> None:
    """Move all files of the folder `partial` to `target`, which is on the same disk, CONFIG last.

    Raises OSError, and UserError if another command has written to `target` meanwhile.
    """
    for path in partial.iterdir():
        fsync_path(path)
    refuse_files(target)
    for name in sorted(os.listdir(partial), key=lambda name: name == CONFIG):
        os.rename(partial / name, target / name)
    fsync_path(target)


def write_files(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer | None) -> str:
    """Write model and model card to `folder`; return the name of the model class in transformers.

    Also writes tokenizer.json and tokenizer_config.json, if a tokenizer.json can describe `tokenizer`.
    """
    config, tensors = snapshot.config, snapshot.tensors("model.")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    content = tokenizer.to_tokenizer_json() if tokenizer else None
    end = tokenizer.end_of_text if tokenizer and content else None
    architecture = save_model(folder, config, tensors, end)
    prompt = None
    if tokenizer and content:
        prompt = tokenizer.decode(tokenizer.default_prompt()) or "The"
        (folder / "tokenizer.json").write_bytes(as_trained(content))
        about = tokenizer_config(content, config.data.block_size, end)
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    card = model_card(snapshot.manifest, architecture, parameters, prompt)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return architecture


def save_model(folder: Path, config: Config, tensors: dict[str, Tensor], end: int | None) -> str:
    """Write config.json, generation_config.json and model.safetensors to `folder`.

    Returns the name of the model class in transformers. `tensors` has the weights by this project's names.
    `end` is the id of the end-of-text token; None if there is no such token.
    """
    kind, transformers = convertible(config.model.arch).hf_model_type, import_transformers()
    vocab_size, block_size = len(tensors["wte.weight"]), config.data.block_size
    fields = hf_fields(config.model, vocab_size=vocab_size, block_size=block_size, end_of_text=end)
    if kind == "gpt2":
        fields["n_ctx"] = block_size  # which llama.cpp's converter reads
    with torch.device("meta"):
        about = transformers.AutoConfig.for_model(kind, **fields)
        model = transformers.AutoModelForCausalLM.from_config(about)
    model.load_state_dict(to_hf(tensors, config.model), strict=False, assign=True)
    model.tie_weights()
    model.generation_config.pad_token_id = end
    model.save_pretrained(folder, max_shard_size="1TB")
    # safetensors creates the file without read permission for other users.
    with contextlib.suppress(OSError):  # a file system without modes
        shutil.copymode(folder / CONFIG, folder / "model.safetensors")
    return type(model).__name__


def as_trained(content: bytes) -> bytes:
    """Return a tokenizer.json that encodes as `JsonTokenizer` does with `content`, also in other programs.

    They would obey what `JsonTokenizer` ignores: truncation, padding, dropout, and a post-processor that adds
    special tokens. If there is nothing of this, `content` is returned.
    """
    spec: dict[str, Any] = json.loads(content)
    spec["truncation"] = spec["padding"] = None
    if spec["model"].get("dropout"):
        spec["model"]["dropout"] = None
    if (spec.get("post_processor") or {}).get("type") != "ByteLevel":  # this one adds none
        spec["post_processor"] = None
    if spec == json.loads(content):
        return content
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()


def tokenizer_config(content: bytes, block_size: int, end: int | None) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json for a tokenizer.json with this content.

    `block_size` is the number of tokens that the model can read. `end` is the id of the end-of-text token;
    None if there is no such token.
    """
    added = {one["id"]: one["content"] for one in json.loads(content).get("added_tokens") or []}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the name of a special token in a text is plain text, as in training
        # By default transformers before 5 adds token_type_ids, whose embeddings GPT2LMHeadModel would add.
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": added.get(end),
        "eos_token": added.get(end),
    }
