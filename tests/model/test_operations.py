"""The operations on a device: those of the table, or torch's own, which compute the same."""

import pytest
import torch
from support.models import ARCHITECTURES, Arch, make_model, make_tokens
from torch import Tensor

from mingpt.base import extras
from mingpt.config import ModelConfig
from mingpt.model import GPT, operations
from mingpt.model.gpt import Dropout


def results(arch: Arch, dtype: torch.dtype) -> list[Tensor]:
    """The loss and every gradient of a model with always the same weights."""
    model, tokens = make_model(arch), make_tokens()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(tokens, tokens.roll(-1, 1))[1]
    assert loss is not None
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_without_the_module_of_the_table_a_model_computes_the_same_up_to_rounding(
    arch: Arch, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(arch, dtype)
    monkeypatch.setitem(operations.OPERATIONS, "cpu", "mingpt.extras.no_such_extra:cpu_operations")
    monkeypatch.setattr(operations, "loaded", {})
    monkeypatch.setattr(extras, "missing", [])
    found = results(arch, dtype)
    assert operations.loaded == {"cpu": operations.Operations}
    differences = [
        float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
    ]
    assert 0 < max(differences) < tolerance


def test_operations_are_imported_when_a_model_gets_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import at the first call would break the graph of torch.compile; no call is made on meta."""
    monkeypatch.setattr(operations, "loaded", {})
    with torch.device("meta"):
        model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=2), vocab_size=2, block_size=2)
    assert not operations.loaded
    model.to_empty(device="cpu").init_buffers()
    assert list(operations.loaded) == ["cpu"]


@pytest.mark.parametrize("compiling", [False, True])
def test_dropout_drops_in_training_alone(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer, x = Dropout(0.25), torch.ones(400, 500)
    torch.manual_seed(6)
    dropped = layer(x)
    assert 0.248 < float((dropped == 0).float().mean()) < 0.252
    assert torch.equal(dropped[dropped != 0].unique(), torch.tensor([4 / 3]))
    layer.eval()
    assert torch.equal(layer(x), x)
