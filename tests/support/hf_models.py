"""Makes models of transformers with random weights, and run folders with a snapshot, for tests."""

from pathlib import Path
from typing import Any

import torch

from mingpt.config import Config, ModelConfig, to_dict
from mingpt.data import CharTokenizer
from mingpt.model import GPT
from mingpt.snapshot import Store
from mingpt.tools.hugging_face import form_of, hf_fields, import_transformers
from mingpt.training.contents import describe_tokenizer
from support.models import add_noise
from support.snapshots import make_manifest, write
from support.training import make_optimizer


def their_model(config: ModelConfig, vocab_size: int = 31, block_size: int = 24) -> Any:
    """The model of transformers that corresponds to `config`, with random weights, biases and norms."""
    transformers = import_transformers()
    torch.manual_seed(3)
    fields = hf_fields(config, vocab_size=vocab_size, block_size=block_size)
    theirs = transformers.AutoConfig.for_model(form_of(config.arch).model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(theirs).eval()
    add_noise(model)
    return model


def load_with_transformers(folder: Path) -> tuple[Any, Any]:
    transformers = import_transformers()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, output_loading_info=True
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def save_run(folder: Path | str, config: Config, characters: str, step: int = 30, loss: float = 0.5) -> GPT:
    """Write a snapshot of a random model to a run folder. `characters` make the tokenizer's vocabulary."""
    torch.manual_seed(5)
    tokenizer = CharTokenizer(characters)
    model = GPT(config.model, vocab_size=len(characters), block_size=config.data.block_size).eval()
    add_noise(model)
    optimizer = make_optimizer(model, config.optimizer)
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    about = describe_tokenizer(tokenizer, len(characters))
    data = {"path": "https://name:secret@host/data.txt?signature=secret", "sha256": "0" * 64}
    fields = make_manifest(step, loss, config=to_dict(config), tokenizer=about, data=data)
    store = Store(f"{folder}/snapshots")
    store.prepare()
    write(store, fields, tensors, tokenizer.to_bytes())
    return model
