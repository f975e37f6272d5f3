import pytest
import torch
from support.models import make_model, make_tokens

from mingpt.model import from_gpt2
from mingpt.weights import load_weights


def test_gpt2_gives_the_logits_of_transformers() -> None:
    """Random weights, copied by the same path that reads a GPT-2 file."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=24, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = make_model("gpt2")
    load_weights(ours, from_gpt2(theirs.state_dict()), "transformers")
    with torch.no_grad():
        expected, logits = theirs(make_tokens()).logits, ours(make_tokens())[0]
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-4
