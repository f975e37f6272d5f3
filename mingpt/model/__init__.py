"""GPT in two architectures, from tokens to logits and loss, with the same bits on the same kind of device.

Exports the model, the module that is trained (`LossModule`), generation and compilation. Uses no data and no
ranks.
"""

from mingpt.model.compile import (
    can_compile_block,
    choose_compile,
    compile_blocks,
    compile_model,
    import_compiler,
)
from mingpt.model.gpt import GPT, LossModule, draw_weight, generate_batch, parameter_shapes

__all__ = [
    "GPT",
    "LossModule",
    "can_compile_block",
    "choose_compile",
    "compile_blocks",
    "compile_model",
    "draw_weight",
    "generate_batch",
    "import_compiler",
    "parameter_shapes",
]
