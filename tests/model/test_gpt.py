import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mingpt.config import ModelConfig
from mingpt.generate import Cache, generate
from mingpt.model import GPT, masked

SMALL = ModelConfig(n_layer=3, n_head=4, n_embd=48)
ARCHITECTURES = ["gpt2", "modern"]


def model(arch: str, vocab_size: int = 31, block_size: int = 24, spread: bool = True) -> GPT:
    """A model in eval mode; `spread` gives every matrix, also those that begin at zero, random weights."""
    torch.manual_seed(0)
    made = GPT(replace(SMALL, arch=arch), vocab_size=vocab_size, block_size=block_size)  # type: ignore[arg-type]
    if spread:
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
    return made.eval()


def tokens(batch: int = 2, length: int = 24, vocab_size: int = 31) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [24, 600])
def test_changing_a_token_leaves_earlier_logits_alone(arch: str, dtype: torch.dtype, length: int) -> None:
    """Bit for bit, at every position, with attention written out (24) and from the library (600)."""
    made, before = model(arch, block_size=length), tokens(length=length)
    for position in (1, length // 2, length - 1):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % 31
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            one, two = made(before)[0], made(after)[0]
        assert torch.equal(one[:, :position], two[:, :position]) and not torch.equal(one[:, position], two[:, position])


def test_gpt2_gives_the_logits_of_transformers() -> None:
    """Random weights, copied across by the same path that reads a GPT-2 file."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    from mingpt.resume import from_gpt2, load_weights

    torch.manual_seed(2)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_positions=24, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3)
    ).eval()
    ours = model("gpt2")
    load_weights(ours, from_gpt2(theirs.state_dict()), "transformers")
    with torch.no_grad():
        expected, logits = theirs(tokens()).logits, ours(tokens())[0]
    assert expected.abs().max() > 1 and (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_a_compiler_is_given_for_the_cpu_computes_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, inputs = model(arch), tokens()
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        logits, loss = network(inputs, inputs)
        loss.backward()
        results.append((logits.detach(), [weight.grad for weight in network.parameters()]))
        network.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_compiler_is_given_the_dropout_that_was_asked_for() -> None:
    x = torch.ones(400, 500)
    torch.manual_seed(5)
    dropped = masked(x, 0.25)
    kept = dropped[dropped != 0]
    assert 0.248 < 1 - kept.numel() / x.numel() < 0.252 and torch.equal(kept, torch.full_like(kept, 4 / 3))
    assert masked(x, 0.0) is x


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_loss_is_the_mean_over_the_targets(arch: str) -> None:
    made, inputs, targets = model(arch), tokens(), tokens().roll(-1, 1)
    logits, loss = made(inputs, targets)
    assert logits.shape == (2, 24, 31)
    picked = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
    assert loss is not None and torch.allclose(loss, -picked.mean()) and made(inputs)[1] is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_fresh_model_knows_nothing(arch: str) -> None:
    loss = model(arch, spread=False)(tokens(), tokens().roll(5, 1))[1]
    assert loss is not None and abs(loss.item() - math.log(31)) < 0.1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_number_of_parameters_as_counted_by_hand(arch: str) -> None:
    width, biases = 48, 13 * 48 if arch == "gpt2" else 0  # per block: four linear biases, two LayerNorms
    blocks = 3 * (12 * width * width + biases)
    around = 31 * width + (24 * width + 2 * width if arch == "gpt2" else 31 * width)
    assert sum(weight.numel() for weight in model(arch).parameters()) == blocks + around


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_cache_changes_nothing(arch: str) -> None:
    made, text = model(arch), tokens(1)
    with torch.no_grad():
        whole = made(text)[0]
        cache, parts = Cache(made), []
        for piece in text.split([7, 1, 1, 10, 5], dim=1):
            parts.append(made(piece, cache=cache)[0])
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_writing_with_the_cache_is_writing_without(arch: str) -> None:
    made, text = model(arch), tokens(1, 4)[0].tolist()
    written = list(generate(made, text, 20, temperature=0))
    with torch.no_grad():
        for token in written:
            assert made(torch.tensor([text]))[0][0, -1].argmax() == token
            text.append(token)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("prompt", [1, 24, 100])
def test_writing_goes_on_past_the_context(arch: str, prompt: int) -> None:
    made, text = model(arch), tokens(1, prompt)[0].tolist()
    written = list(generate(made, text, 90, seed=4))
    assert len(written) == 90 and written == list(generate(made, text, 90, seed=4)) != list(generate(made, text, 90, seed=5))


def test_top_k_keeps_to_the_likeliest() -> None:
    made = model("modern")
    assert list(generate(made, [1], 20, top_k=1, temperature=2.0)) == list(generate(made, [1], 20, temperature=0))


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens do not fit in block_size 24"):
        model("gpt2")(tokens(1, 25))
