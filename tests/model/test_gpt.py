from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.golden import Golden
from support.models import ARCHITECTURES, Arch, make_model, make_tokens

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import LossModule, parameter_shapes


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_operations_per_token_are_those_counted_by_hand(arch: Arch) -> None:
    """There are six per weight of a matrix product, head included, plus the two products of attention."""
    products = 3 * 12 * 48 * 48 + 31 * 48
    assert make_model(arch).flops_per_token() == 6 * products + 3 * 12 * 48 * 24


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens do not fit in block_size 24"):
        make_model("gpt2")(make_tokens(1, 25))


CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=8)
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
    found = parameter_shapes(replace(CONFIG, arch=arch), vocab_size=5, block_size=7)
    assert list(found.items()) == list(EXPECTED[arch].items())


@pytest.mark.parametrize("width", [10**12, 10**20, 10])
def test_a_model_that_cannot_be_is_one_sentence(width: int, golden: Golden) -> None:
    with pytest.raises(UserError) as error:
        parameter_shapes(replace(CONFIG, n_embd=width), vocab_size=5, block_size=7)
    golden(str(error.value))
