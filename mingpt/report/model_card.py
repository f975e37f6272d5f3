"""The README.md of an exported model: its figures, how it was trained and how it is loaded."""

from collections.abc import Mapping
from typing import Any

import yaml

from mingpt.redact import redact
from mingpt.settings import flatten, settings

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
