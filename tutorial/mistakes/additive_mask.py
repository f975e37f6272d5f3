"""Mistake: an attention mask of zeros and ones that is added to the scores.

    python -m tutorial.mistakes.additive_mask

scaled_dot_product_attention adds a mask of floats to the scores. A 0 then hides nothing: every position reads
the tokens after it, which are its targets. The loss becomes very low, and the generated text is bad.
Right: a mask of bools, where False hides, or is_causal=True. To test a model, change the last token: no
output before it may change.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def largest_change(mask: torch.Tensor) -> float:
    """How much the outputs before the last token change if that token changes."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 8, 16)  # after the embedding
    changed = tokens.clone()
    changed[:, -1] = torch.randn(16)
    before, after = (scaled_dot_product_attention(x, x, x, attn_mask=mask) for x in (tokens, changed))
    return (before - after)[:, :-1].abs().max().item()


if __name__ == "__main__":
    ones_and_zeros = torch.ones(8, 8).tril()
    wrong, right = largest_change(ones_and_zeros), largest_change(ones_and_zeros.bool())
    print(f"wrong: {wrong:.6f} largest change of an output before the token that was changed")
    print(f"right: {right:.6f} largest change of an output before the token that was changed")
