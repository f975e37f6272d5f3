"""Each layer, as it is compiled and as the CPU computes it, against torch's own operation."""

import pytest
import torch

from mingpt.model.layers import Dropout


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
