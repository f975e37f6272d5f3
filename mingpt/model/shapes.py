"""The shapes of a model's parameters, without the model: a file's tensors are compared with them first."""

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
