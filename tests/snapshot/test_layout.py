from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load
from support.snapshots import TENSORS

from mingpt.snapshot.layout import (
    KINDS,
    Staging,
    are_files_of,
    files_of,
    make_layout,
    memory_of,
    specs_of,
    steps_in,
)


def test_weights_and_optimizer_state_lie_in_files_of_their_own() -> None:
    """The order in which the tensors are given does not matter."""
    specs = specs_of(TENSORS | {"tokenizer": torch.arange(7, dtype=torch.uint8)})
    weights, optimizer = make_layout(dict(reversed(specs.items())), 12)
    assert weights.name == "step_00000012.safetensors"
    assert list(weights.begins) == ["model.wte", "model.half", "tokenizer"], "the largest elements first"
    assert optimizer.name == "step_00000012.optimizer.safetensors"
    assert list(optimizer.begins) == ["optimizer.wte.step"]


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


def test_where_cuda_cannot_lock_a_buffer_one_line_says_so_and_copies_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Mock())
    monkeypatch.setattr(torch.cuda, "check_error", Mock(side_effect=RuntimeError("CUDA error 2")))
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError("the error that CUDA remembers")))
    caplog.set_level("INFO", "mingpt")
    for staging in (Staging(TENSORS), Staging(TENSORS)):
        staging.lock_pages()
        staging.fill(TENSORS)
    (line,) = caplog.messages
    assert line.endswith("CUDA cannot lock host memory (CUDA error 2)")


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


WEIGHTS, OPTIMIZER, TOKENIZER = (f"step_00000003.{kind}" for kind in (*KINDS, "tokenizer"))


@pytest.mark.parametrize(
    ("names", "is_snapshot"),
    [
        ([WEIGHTS], True),
        ([WEIGHTS, OPTIMIZER], True),
        ([WEIGHTS, TOKENIZER], True),
        ([WEIGHTS, OPTIMIZER, TOKENIZER], True),
        ([], False),
        (["step_00000003.json"], False),
        (["step_00000004.safetensors"], False),
        ([OPTIMIZER], False),
        ([OPTIMIZER, WEIGHTS], False),
        ([WEIGHTS, WEIGHTS], False),
        (["../step_00000003.safetensors"], False),
        ([WEIGHTS, TOKENIZER, OPTIMIZER], False),
    ],
)
def test_a_snapshot_has_weights_first_and_then_perhaps_an_optimizers_state_and_a_tokenizer(
    names: list[str], is_snapshot: bool
) -> None:
    assert are_files_of(names, 3) == is_snapshot
