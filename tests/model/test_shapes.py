"""Names, shapes and order of the parameters: snapshots hold them, and a run's bits depend on their order."""

from dataclasses import replace

import pytest
from support.models import ARCHITECTURES, Arch

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import parameter_shapes

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
