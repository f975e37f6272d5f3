"""GPT in two architectures: tokens to logits and loss, the same bits on the same kind of device.

Exports the model, the module that is trained (`LossModule`), generation and compilation. Knows no data and no
ranks.
"""

from mingpt.model.compile import compile_model, import_compiler
from mingpt.model.generate import generate
from mingpt.model.gpt import GPT, LossModule
from mingpt.model.hf import from_gpt2
from mingpt.model.shapes import parameter_shapes

__all__ = ["GPT", "LossModule", "compile_model", "from_gpt2", "generate", "import_compiler",
           "parameter_shapes"]  # fmt: skip
