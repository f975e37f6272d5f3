import itertools

import pytest
from support.models import ARCHITECTURES, Arch

from mingpt.config import ModelConfig
from mingpt.model import GPT, parameter_shapes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shapes_are_those_of_the_model(arch: Arch) -> None:
    for n_layer, n_head, width, vocab_size, block_size in itertools.product(
        (1, 3), (1, 2), (8, 12), (5,), (7,)
    ):
        config = ModelConfig(arch=arch, n_layer=n_layer, n_head=n_head, n_embd=width)
        model = GPT(config, vocab_size=vocab_size, block_size=block_size)
        expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        assert parameter_shapes(config, vocab_size=vocab_size, block_size=block_size) == expected
