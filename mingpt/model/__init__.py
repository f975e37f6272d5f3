"""A GPT, from tokens to logits and loss.

`gpt.py` has what the architectures share; each value of model.arch has a file for what is different. The
package exports the model, the module that is trained (`LossModule`), generation and compilation. The package
uses neither mingpt.data nor a process group.
"""

from mingpt.model.compile import can_compile_block, choose_compile, compile_blocks
from mingpt.model.gpt import GPT, LossModule, generate_batch, parameter_shapes

__all__ = [
    "GPT",
    "LossModule",
    "can_compile_block",
    "choose_compile",
    "compile_blocks",
    "generate_batch",
    "parameter_shapes",
]
