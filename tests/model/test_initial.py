import math
from dataclasses import replace

import pytest
import torch
from support.golden import Golden
from support.models import ARCHITECTURES, CONFIG, Arch
from torch import nn

from mingpt.base.errors import UserError
from mingpt.model import GPT, parameter_shapes

SIZES = {"vocab_size": 31, "block_size": 24}


# {part: standard deviation}. Parts that are not here are the same everywhere: biases 0, and norms 1.
SPREAD = {
    "gpt2": {"wte": 0.02, "wpe": 0.02, "c_attn": 0.02, "c_fc": 0.02, "c_proj": 0.02 / math.sqrt(6)},
    "modern": {"wte": 1.0, "c_attn": 48**-0.5, "c_fc": 48**-0.5},  # c_proj and the head begin at zero
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_weights_are_spread_as_the_table_says(arch: Arch) -> None:
    config = replace(CONFIG, arch=arch)
    model = GPT(config, **SIZES)
    for name, shape in parameter_shapes(config, vocab_size=1000, block_size=1000).items():
        weight, (part, kind) = model.draw_weight(name, shape, 1), name.split(".")[-2:]
        std = SPREAD[arch].get(part, 0.0) if kind == "weight" else 0.0
        assert float(weight.std()) == pytest.approx(std, rel=0.05), name
        mean = 1.0 if part.startswith("ln_") and kind == "weight" else 0.0
        assert float(weight.mean()) == pytest.approx(mean, abs=0.05 * std), name


def test_a_weight_depends_on_seed_and_name_alone() -> None:
    model, shape = GPT(CONFIG, **SIZES), (1001, 777)  # large enough for torch to use several threads
    weight = model.draw_weight("h.0.attn.c_attn.weight", shape, 1)
    torch.manual_seed(77)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        with torch.device("meta"):  # whatever the default device is
            again = model.draw_weight("h.0.attn.c_attn.weight", shape, 1)
        assert torch.equal(again, weight)
    assert torch.equal(torch.get_rng_state(), state)
    for name, seed in (("h.0.attn.c_attn.weight", 2), ("h.1.attn.c_attn.weight", 1)):
        assert not torch.equal(model.draw_weight(name, shape, seed), weight)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_has_the_weights_that_are_drawn_by_name_also_if_it_is_filled_later(arch: Arch) -> None:
    with torch.device("meta"):
        model = GPT(replace(CONFIG, arch=arch), **SIZES)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7.0)
    model.init_weights(5)
    model.init_buffers()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, model.draw_weight(name, tuple(weight.shape), 5)), name
    buffers = dict(GPT(replace(CONFIG, arch=arch), **SIZES).named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    "module",
    [nn.PReLU(), nn.GRU(2, 2), nn.Linear(2, 2, dtype=torch.float64), nn.BatchNorm1d(2, affine=False)],
    ids=["a weight", "one of several", "a type", "a buffer"],
)
def test_a_weight_or_buffer_that_no_rule_is_for_is_refused_by_name(module: nn.Module, golden: Golden) -> None:
    model = GPT(CONFIG, **SIZES)
    model.h[0] = module
    with pytest.raises(UserError) as error:
        model.check_parameters()
        model.init_buffers()
    golden(str(error.value))
    module.initial_weight = lambda name, shape, generator: torch.rand(shape, generator=generator)  # type: ignore[assignment]
    first, again, other = (model.draw_weight(name, (3,), 1) for name in ("h.0.x", "h.0.x", "h.0.y"))
    assert torch.equal(first, again) and not torch.equal(first, other)
