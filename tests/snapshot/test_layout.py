import pytest
import torch
from safetensors.torch import load
from support.snapshots import TENSORS

from mingpt.snapshot.layout import Staging, files_of, make_layout, memory_of, specs_of, steps_in


def test_the_chunks_of_a_layout_are_safetensors_files_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.snapshot.layout.PIECE_BYTES", 40)
    tensors = TENSORS | {
        "model.bytes": torch.arange(3, dtype=torch.uint8),
        "model.empty": torch.zeros(0, 4),
        "model.long": torch.arange(5),
        "model.scalar": torch.tensor(2.5, dtype=torch.float64),
        "model.half": torch.ones(3, dtype=torch.bfloat16),
        "model.not_contiguous": torch.arange(6.0).view(2, 3).T,
    }
    staging = Staging(tensors)
    staging.fill(tensors)
    found: dict[str, torch.Tensor] = {}
    for layout in make_layout(specs_of(tensors), 3):
        chunks = [memory_of(piece) for piece in staging.pieces(layout.begins)]
        assert all(len(chunk) <= 40 for chunk in chunks)
        found |= load(b"".join([layout.header, *chunks]))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


OTHERS = [
    "step_9.json",
    "step_000000009.json",
    "step_٠٠٠٠٠٠٠٩.json",
    "step_00000009.pt",
    "step_" + "9" * 30,
    "step_00000009-00001-of-00003.safetensors",
    "step_00000009.optimizer.json",
    "step_00000009.weights.safetensors",
    "partial-step_00000009.safetensors",
    "step_000000009.optimizer.safetensors",
]


def test_only_the_names_that_files_of_a_step_are_given_count() -> None:
    names = [*OTHERS, "step_00000009.json", "step_00000010.safetensors", "step_00000009.safetensors"]
    assert steps_in(OTHERS) == [] and steps_in(names) == [10, 9]
    assert (steps_in(names, "json"), steps_in(names, "safetensors")) == ([9], [10, 9])
    assert files_of(names, 9) == ["step_00000009.safetensors", "step_00000009.json"]
