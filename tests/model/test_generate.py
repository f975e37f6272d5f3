import pytest
import torch
from support.models import ARCHITECTURES, Arch, generate, make_model, make_tokens

from mingpt.model.gpt import choose, generate_batch
from mingpt.model.operations import KeyValues


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("prompt", [1, 24, 100])
def test_generating_with_the_cache_is_generating_without(
    arch: Arch, prompt: int, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the context is full, generation goes on from its newest half. A model may use no cache."""
    model, text = make_model(arch), make_tokens(1, prompt)[0].tolist()
    if not has_cache:
        monkeypatch.setattr(KeyValues, "extend", lambda _, key, value: (key, value))
    generated = list(generate(model, text, 60, temperature=0))
    assert len(generated) == 60
    text = text[-model.block_size :]
    for token in generated:
        if len(text) > model.block_size:
            text = text[-(model.block_size // 2) :]
        assert model(torch.tensor([text]))[0][0, -1].argmax() == token
        text.append(token)


@pytest.mark.parametrize(
    ("top_p", "temperature", "top_k", "kept"),
    [
        (1e-9, 1.0, None, {3}),
        (0.6, 1.0, None, {3, 1}),
        (0.8, 1.0, None, {3, 1, 0}),
        (1.0, 1.0, None, {3, 1, 0, 2}),
        (0.6, 1.0, 2, {3}),
        (1.0, 1.0, 2, {3, 1}),
        (0.7, 0.5, None, {3}),
        (1.0, 1e-46, None, {3}),  # float32 cannot hold such a temperature
    ],
)
def test_top_p_keeps_the_fewest_most_likely_tokens_that_sum_to_it(
    top_p: float, temperature: float, top_k: int | None, kept: set[int]
) -> None:
    """top_p applies after temperature and top_k, which leave token 3 a probability of 0.72 and 0.67."""
    logits, generator = torch.tensor([0.15, 0.25, 0.1, 0.5]).log(), torch.Generator().manual_seed(0)
    assert {choose(logits, temperature, top_k, generator, top_p) for _ in range(200)} == kept


def test_a_seed_draws_from_the_softmax_at_this_temperature_once_a_token() -> None:
    """A seed's text changes if anything else is drawn, or drawn in another order."""
    model, generator = make_model("modern"), torch.Generator().manual_seed(3)
    text = [1]
    for token in generate(model, text, 20, temperature=0.7, seed=3):
        logits = model(torch.tensor([text]))[0][0, -1]
        probabilities = torch.softmax((logits - logits.max()) / 0.7, dim=-1)
        assert int(torch.multinomial(probabilities, 1, generator=generator)) == token
        text = [*text, token]


@pytest.mark.parametrize("training", [True, False])
def test_generation_makes_no_inference_tensors_and_leaves_the_mode_as_it_was(training: bool) -> None:
    """A sharded model keeps tensors of its first forward pass, and trains with them later."""
    model, modes = make_model("modern").train(training), set()
    model.register_forward_hook(
        lambda *_: modes.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    )
    assert len(list(generate(model, [1], 3))) == 3
    assert modes == {(False, False)} and torch.is_grad_enabled() and model.training == training


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("ends", [False, True])
def test_a_sample_of_a_batch_is_the_one_of_its_seed_however_many_are_beside_it(
    arch: Arch, ends: bool
) -> None:
    """This holds also past the context. A sample that has ended yields nothing more, and the others go on."""
    model, text = make_model(arch), make_tokens(1, 4)[0].tolist()
    end = list(generate(model, text, 60, seed=0))[7] if ends else None
    alone = [list(generate(model, text, 60, seed=seed, end=end)) for seed in range(5)]
    assert (len({len(tokens) for tokens in alone}) > 1) == ends
    for size in (1, 2, 5):
        steps = list(generate_batch(model, text, 60, range(size), end=end))
        assert len(steps) == max(map(len, alone[:size]))
        for tokens, row in zip(alone, zip(*steps, strict=True), strict=False):
            assert [*row] == tokens + [None] * (len(steps) - len(tokens))
