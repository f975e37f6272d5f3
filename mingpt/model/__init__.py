"""A GPT from tokens to logits and loss, with the same bits on the same kind of device.

`gpt.py` has what architectures share, and a file for each value of model.arch what it does differently.
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
from mingpt.model.gpt import GPT, LossModule, generate_batch, parameter_shapes

__all__ = [
    "GPT",
    "LossModule",
    "can_compile_block",
    "choose_compile",
    "compile_blocks",
    "compile_model",
    "generate_batch",
    "import_compiler",
    "parameter_shapes",
]
