"""The GPU's path through model, loss and optimizer, with tensors that have a device but no content.

Backward passes cannot be run in this way, so gradients are made up.
"""

import pytest
import torch
from support.training import gradients_of, make_optimizer
from torch._subclasses.fake_tensor import FakeTensorMode

from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.model import GPT, LossModule
from mingpt.parallel.ddp import allocate
from mingpt.parallel.strategy import clip, row_norms, total_norm

CUDA = torch.device("cuda", 0)
NEEDS_CUDA_BUILD = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs torch built for CUDA, and no GPU"
)


def make_model(config: ModelConfig, vocab_size: int, block_size: int) -> GPT:
    """Make a model inside FakeTensorMode, where neither Module.to nor Module.to_empty works."""
    with torch.device("meta"):
        model = GPT(config, vocab_size=vocab_size, block_size=block_size)
    allocate(model, CUDA)
    model.init_weights(1)
    model.init_buffers()
    return model


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("vocab_size", [50, 50257])  # the loss of many logits is computed in chunks
def test_no_tensor_is_left_on_another_device(arch: str, name: str, vocab_size: int) -> None:
    """FakeTensorMode raises if an operation mixes devices. Autocast needs a GPU, so it is left out."""
    shape = (4, 64) if vocab_size < 1000 else (32, 1024)
    config = ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=32, dropout=0.1)  # type: ignore[arg-type]
    with FakeTensorMode():
        model = make_model(config, vocab_size, shape[1])
        optimizer = make_optimizer(model, OptimizerConfig(name=name))  # type: ignore[arg-type]
        tokens = torch.zeros(shape, dtype=torch.long, device=CUDA)
        loss = LossModule(model)(tokens, tokens)
        logits, _ = model(tokens)
        assert loss.device == CUDA and loss.shape == () and logits.device == CUDA
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        gradients = gradients_of(model)
        norm = total_norm(torch.cat([row_norms(gradient) for gradient in gradients.values()]))
        assert norm.device == CUDA
        clip(gradients, norm, 1.0)
        optimizer.step(0.01, gradients)
        tensors = [*model.parameters(), *model.buffers(), *optimizer.state_dict().values()]
        assert {tensor.device for tensor in tensors} == {CUDA}
