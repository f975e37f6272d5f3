"""Weights of Hugging Face's models under this project's names."""

from torch import Tensor

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def from_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT2LMHeadModel's tensors for `arch: gpt2`; its Conv1D matrices are (in, out), ours (out, in)."""
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {
        name: tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
        for name, tensor in named.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and name != "lm_head.weight"
    }
