"""`model.arch=modern`: a GPT of today.

| | `gpt2` | `modern` |
|---|---|---|
| positions | learned, added (`wpe`) | rotary, on queries and keys (Su et al. 2021) |
| normalisation | LayerNorm with weight and bias | RMSNorm, no parameters, on `wte`, queries and keys too |
| MLP | 4 x, tanh-approximated GELU | 4 x, squared ReLU |
| biases | in all linear layers of a block | nowhere |
| head | tied to `wte` | its own matrix |
| weights begin as | N(0, 0.02) | N(0, 1 / sqrt(fan_in)); `wte` N(0, 1); head zero |
| `c_proj` begins as | N(0, 0.02 / sqrt(2 n_layer)) | zero |

N(0, s) has standard deviation s.
"""

from torch import Tensor

from mingpt.model.gpt import ARCHITECTURES, GPT
from mingpt.model.operations import rms_norm


class Modern(GPT):
    def embed(self, tokens: Tensor, start: int) -> Tensor:
        return rms_norm(self.wte(tokens))


ARCHITECTURES["modern"] = Modern
