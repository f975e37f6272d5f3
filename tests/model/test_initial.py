import math
from dataclasses import replace

import pytest
import torch
from support.models import ARCHITECTURES, CONFIG, Arch
from torch import nn

from mingpt.base.errors import UserError
from mingpt.model import GPT, parameter_shapes

SIZES = {"vocab_size": 31, "block_size": 24}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_weights_are_spread_as_the_table_says(arch: Arch) -> None:
    config = replace(CONFIG, arch=arch)
    width, layers = config.n_embd, config.n_layer
    expected = {
        "gpt2": {"c_proj": 0.02 / math.sqrt(2 * layers), "wte": 0.02, "wpe": 0.02, "c_fc": 0.02},
        "modern": {"c_proj": 0.0, "wte": 1.0, "c_fc": width**-0.5, "c_attn": width**-0.5, "lm_head": 0.0},
    }[arch]
    model = GPT(config, **SIZES)
    for name, shape in parameter_shapes(config, vocab_size=1000, block_size=1000).items():
        weight = model.draw_weight(name, shape, 1)
        assert (weight.shape, weight.dtype, weight.device.type) == (shape, torch.float32, "cpu")
        part = name.split(".")[-2]
        if name.endswith("bias"):
            assert not weight.any(), name
        elif part.startswith("ln_"):
            assert bool((weight == 1).all()), name
        elif part in expected:
            assert float(weight.std()) == pytest.approx(expected[part], rel=0.05), name
            assert abs(float(weight.mean())) <= 0.05 * expected[part], name


def test_a_weight_depends_on_seed_and_name_alone() -> None:
    model, shape = GPT(CONFIG, **SIZES), (1001, 777)  # large enough for torch to use several threads
    weight = model.draw_weight("h.0.attn.c_attn.weight", shape, 1)
    torch.manual_seed(77)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with torch.device("meta"):  # whatever the default device is
                again = model.draw_weight("h.0.attn.c_attn.weight", shape, 1)
            assert torch.equal(again, weight)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model.draw_weight("h.0.attn.c_attn.weight", shape, 2), weight)
    assert not torch.equal(model.draw_weight("h.1.attn.c_attn.weight", shape, 1), weight)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_has_the_weights_that_are_drawn_by_name_also_if_it_is_filled_later(arch: Arch) -> None:
    config = replace(CONFIG, arch=arch)
    expected = GPT(config, **SIZES)
    expected.init_weights(5)
    for name, weight in expected.named_parameters():
        assert torch.equal(weight, expected.draw_weight(name, tuple(weight.shape), 5)), name
    with torch.device("meta"):
        model = GPT(config, **SIZES)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7.0)
    model.init_weights(5)
    model.init_buffers()
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.PReLU(), r"no rule says with which values h\.0\.weight .*: give PReLU a method initial_weight"),
        (nn.GRU(2, 2), r"no rule says with which values h\.0\.weight_ih_l0 "),
        (nn.Linear(2, 2, dtype=torch.float64), r"h\.0\.weight of .* is torch\.float64: make it float32"),
        (
            nn.BatchNorm1d(2, affine=False),
            r"nothing computes the buffer h\.0\.running_mean .* give BatchNorm1d",
        ),
    ],
)
def test_a_weight_or_buffer_that_no_rule_is_for_is_refused_by_name(module: nn.Module, sentence: str) -> None:
    model = GPT(CONFIG, **SIZES)
    model.h[0] = module
    with pytest.raises(UserError, match=sentence):
        model.check_parameters()
        model.init_buffers()
    module.initial_weight = lambda name, shape, generator: torch.rand(shape, generator=generator)  # type: ignore[assignment]
    first, again = (model.draw_weight("h.0.x", (3,), 1) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, model.draw_weight("h.0.y", (3,), 1))
