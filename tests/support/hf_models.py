"""Models of transformers with random weights, and folders that hold them, for tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mingpt.config import Config, ModelConfig, to_dict
from mingpt.model import GPT, hf_config
from mingpt.snapshot import SnapshotStore
from support.models import Arch
from support.snapshots import make_manifest, write
from support.training import make_optimizer

CONFIG = {
    "gpt2": ModelConfig(arch="gpt2", n_layer=2, n_head=3, n_embd=24),
    "modern": ModelConfig(arch="modern", n_layer=2, n_head=3, n_embd=24),
}
VOCAB_SIZE, BLOCK_SIZE = 31, 16


def their_model(arch: Arch) -> Any:
    """Biases and norms are random, too."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    torch.manual_seed(3)
    fields = hf_config(CONFIG[arch], vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE)
    config_class = transformers.GPT2Config if arch == "gpt2" else transformers.NanoChatConfig
    model_class = transformers.GPT2LMHeadModel if arch == "gpt2" else transformers.NanoChatForCausalLM
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def drop_prefix(folder: Path, prefix: str) -> None:
    """Rename all tensors of a folder, in its files and in its index."""
    for path in folder.glob("*.safetensors"):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {
            name.removeprefix(prefix): shard for name, shard in index["weight_map"].items()
        }
        path.write_text(json.dumps(index))


def save_run(folder: Path | str, config: Config, characters: str, step: int = 30) -> GPT:
    """Write a run folder with one snapshot: random weights, biases and norms included. Returns the model."""
    torch.manual_seed(5)
    data = config.data
    model = GPT(config.model, vocab_size=len(characters), block_size=data.block_size).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    optimizer = make_optimizer(model, config.optimizer)
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    fields = make_manifest(step, loss=0.5) | {"config": to_dict(config), "vocabulary": characters}
    fields["data"]["path"] = "https://name:secret@host/data.txt?signature=secret"
    store = SnapshotStore(f"{folder}/snapshots")
    store.prepare()
    write(store, fields, tensors)
    return model
