"""The model: its logits, its loss, its parameters and with which values they begin."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.golden import Golden
from support.models import ARCHITECTURES, CONFIG, Arch, make_model, make_tokens
from torch import nn

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import GPT, LossModule, parameter_shapes


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("length", [24, 600])
def test_changing_a_token_leaves_earlier_logits_alone(arch: Arch, bf16: bool, length: int) -> None:
    """Compares bits at every position, for attention written out (24) and attention of the library (600)."""
    model, before = make_model(arch, block_size=length), make_tokens(length=length)
    for position in (1, length // 2, length - 1):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % 31
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            one, two = model(before)[0], model(after)[0]
        assert torch.equal(one[:, :position], two[:, :position])
        assert not torch.equal(one[:, position], two[:, position])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_loss_is_the_mean_over_the_targets(arch: Arch) -> None:
    model, inputs, targets = make_model(arch), make_tokens(), make_tokens().roll(-1, 1)
    logits, loss = model(inputs, targets)
    assert torch.allclose(loss, F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten()))
    assert torch.equal(LossModule(model)(inputs, targets), loss)
    assert loss.requires_grad and not logits.requires_grad, "FSDP2 hooks each output that has a gradient"


SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=8)
BLOCK = {
    "ln_1": (8,), "attn.c_attn": (24, 8), "attn.c_proj": (8, 8),
    "ln_2": (8,), "mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32),
}  # fmt: skip
LAYERS = {f"h.{number}.{part}": shape for number in (0, 1) for part, shape in BLOCK.items()}
EXPECTED = {
    "gpt2": {"wte.weight": (5, 8), "wpe.weight": (7, 8)}
    | {
        f"{name}.{kind}": shape if kind == "weight" else shape[:1]
        for name, shape in (LAYERS | {"ln_f": (8,)}).items()
        for kind in ("weight", "bias")
    },
    "modern": {"wte.weight": (5, 8)}
    | {f"{name}.weight": shape for name, shape in LAYERS.items() if "ln_" not in name}
    | {"lm_head.weight": (5, 8)},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_parameters_are_those_that_snapshots_hold(arch: Arch) -> None:
    found = parameter_shapes(replace(SMALL, arch=arch), vocab_size=5, block_size=7)
    assert list(found.items()) == list(EXPECTED[arch].items())


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
