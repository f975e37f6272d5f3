from dataclasses import replace

import pytest
import torch
from support.models import ARCHITECTURES, Arch, make_model, make_tokens

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import LossModule, parameter_shapes


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [24, 600])
def test_changing_a_token_leaves_earlier_logits_alone(arch: Arch, dtype: torch.dtype, length: int) -> None:
    """Compares bits at every position, for attention written out (24) and attention of the library (600)."""
    model, before = make_model(arch, block_size=length), make_tokens(length=length)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    for position in (1, length // 2, length - 1):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % 31
        with torch.no_grad(), autocast:
            one, two = model(before)[0], model(after)[0]
        assert torch.equal(one[:, :position], two[:, :position])
        assert not torch.equal(one[:, position], two[:, position])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_a_compiler_is_given_for_the_cpu_computes_the_same(
    arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make_model(arch), make_tokens()
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        logits, loss = model(inputs, inputs)
        loss.backward()
        results.append((logits.detach(), [weight.grad for weight in model.parameters()]))
        model.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_loss_is_the_mean_over_the_targets(arch: Arch) -> None:
    model, inputs, targets = make_model(arch), make_tokens(), make_tokens().roll(-1, 1)
    logits, loss = model(inputs, targets)
    assert logits.shape == (2, 24, 31)
    picked = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
    assert loss is not None
    assert torch.allclose(loss, -picked.mean())
    assert loss.requires_grad and not logits.requires_grad, "FSDP2 hooks each output that has a gradient"
    assert torch.equal(LossModule(model)(inputs, targets), loss)
    assert model(inputs)[1] is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_operations_per_token_are_those_counted_by_hand(arch: Arch) -> None:
    """There are six per weight of a matrix product, head included, plus the two products of attention."""
    width, length = 48, 24
    products = 3 * 12 * width * width + 31 * width
    assert make_model(arch).flops_per_token() == 6 * products + 3 * 12 * width * length


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


@pytest.mark.parametrize(
    ("width", "sentence"),
    [
        (10**12, "no tensor can be as large as one of this model"),
        (10**20, "no tensor can be as large as one of this model"),
        (10, r"n_head \(5\) must be even for rotary"),
    ],
)
def test_a_model_that_cannot_be_is_one_sentence(width: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parameter_shapes(replace(CONFIG, n_embd=width), vocab_size=5, block_size=7)
