"""Write a run's newest or best snapshot in Hugging Face's format: python -m mingpt export RUN OUT_DIR.

RUN is the path or URL of a run, such as out/default, or of a snapshot. A model with `model.arch: gpt2`
becomes a GPT2LMHeadModel of transformers, and a model with `model.arch: modern` becomes a
NanoChatForCausalLM. OUT_DIR may hold other files, but none that would be overwritten, and none that
transformers would take for a part of the model. The files appear in OUT_DIR, config.json last, only when all
of them are complete. If the command was killed, remove the folder .mingpt-export-* in OUT_DIR, and the files
that have already appeared.
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
from safetensors import SafetensorError
from torch import Tensor

from mingpt.base.command import CommandParser
from mingpt.base.errors import UserError
from mingpt.base.paths import describe_obstacle, typed_path
from mingpt.base.urls import redact
from mingpt.config import Config
from mingpt.snapshot import Snapshot, open_snapshot
from mingpt.snapshot.manifest import validation_loss
from mingpt.tools.hugging_face import form_of, hf_fields, import_transformers, to_hf
from mingpt.training.contents import check_model, make_tokenizer

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {architecture}, {parameters:,} parameters

Trained by mingpt-distributed.

- steps: {step:,}
- validation loss, nats per token: {loss}
- SHA-256 of the snapshot: `{sha256}`

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # the folder of this file
```

`tokenizer.json`, if it is here, is the tokenizer of the training: `AutoTokenizer.from_pretrained(".")`.
To train it further: `python -m mingpt import FOLDER OUT`, and then
`python train.py snapshot.init_from=OUT`.
"""
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

    `run` is the path or URL of a snapshot's file, or of a run. Of a run, the newest usable snapshot is
    written, or with `best` the one with the lowest validation loss. Returns a line that says what was
    written. The files appear in `out`, config.json last, only when all of them are complete. Raises UserError
    if `out` is a URL, cannot be written, or holds a file that would be overwritten or that transformers would
    read. Also raises UserError if no snapshot can be used or converted, or if transformers is missing.
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
            architecture = write_files(Path(partial), snapshot)
            for name in sorted(os.listdir(partial), key=lambda name: name == CONFIG):
                os.rename(Path(partial) / name, target / name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {describe_obstacle(target, error)}") from None
    return f"step {snapshot.manifest.step} of {run} written to {out} as {architecture}"


def refuse_files(folder: Path) -> None:
    """Raise UserError if the folder holds a file to be overwritten, or another that transformers reads."""
    for name in (*WRITTEN, *READ):
        if os.path.lexists(folder / name):
            raise UserError(
                f"{folder / name} is there already, and would be taken for a part of the model: give another "
                "folder, or move the file away"
            )


def write_files(folder: Path, snapshot: Snapshot) -> str:
    """Write model and model card to `folder`; return the name of the model class in transformers.

    Also writes tokenizer.json and tokenizer_config.json, if a tokenizer.json can describe the tokenizer.
    """
    tokenizer = make_tokenizer(snapshot.manifest, snapshot.read_tokenizer())
    config, manifest, tensors = snapshot.config, snapshot.manifest, snapshot.tensors("model.")
    content = tokenizer.to_tokenizer_json() if tokenizer else None
    end = tokenizer.end_of_text if tokenizer and content else None
    architecture = save_model(folder, config, tensors, end)
    if content:
        (folder / "tokenizer.json").write_bytes(as_trained(content))
        about = tokenizer_config(content, config.data.block_size, end)
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    loss = validation_loss(manifest)
    card = CARD.format(
        architecture=architecture,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        step=manifest.step,
        loss="not measured" if loss is None else f"{loss:.4f}",
        sha256=manifest.sha256,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return architecture


def save_model(folder: Path, config: Config, tensors: dict[str, Tensor], end: int | None) -> str:
    """Write config.json, generation_config.json and model.safetensors to `folder`.

    Returns the name of the model class in transformers. `tensors` has the weights by this project's names.
    `end` is the id of the end-of-text token; None if there is no such token.
    """
    kind, transformers = form_of(config.model.arch).model_type, import_transformers()
    vocab_size, block_size = len(tensors["wte.weight"]), config.data.block_size
    fields = hf_fields(config.model, vocab_size=vocab_size, block_size=block_size, end_of_text=end)
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
    """Return the tokenizer.json `content` without what training ignores, but other programs would obey.

    This is truncation, padding, dropout, and any post-processor but ByteLevel, because it may add special
    tokens. If nothing is changed, `content` is returned.
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
