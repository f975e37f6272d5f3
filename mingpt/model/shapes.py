"""The shapes of a model's parameters and its FLOPs, without building the model."""

import math

from mingpt.config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig, *, vocab_size: int, block_size: int) -> dict[str, Shape]:
    """Those of GPT(config, vocab_size=..., block_size=...).named_parameters(), by name.

    Allocates little, and takes time in proportion to n_layer.
    """
    width, gpt2 = config.n_embd, config.arch == "gpt2"
    shapes: dict[str, Shape] = {"wte.weight": (vocab_size, width)}
    if gpt2:
        shapes["wpe.weight"] = (block_size, width)
    for number in range(config.n_layer):
        block: dict[str, Shape] = {
            "attn.c_attn": (3 * width, width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (4 * width, width),
            "mlp.c_proj": (width, 4 * width),
        }
        if gpt2:
            block |= {"ln_1": (width,), "ln_2": (width,)}
        for name, shape in block.items():
            shapes[f"h.{number}.{name}.weight"] = shape
            if gpt2:
                shapes[f"h.{number}.{name}.bias"] = shape[:1]
    if gpt2:
        return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return shapes | {"lm_head.weight": (vocab_size, width)}


def flops_per_token(config: ModelConfig, *, vocab_size: int, block_size: int) -> float:
    """FLOPs of a forward and backward pass per token (Chowdhery et al. 2022, appendix B)."""
    shapes = parameter_shapes(config, vocab_size=vocab_size, block_size=block_size)
    embeddings = {"wpe.weight"} if config.arch == "gpt2" else {"wte.weight"}  # gpt2's wte is the head too
    matrices = sum(
        math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in embeddings
    )
    return 6.0 * matrices + 12.0 * config.n_layer * config.n_embd * block_size
