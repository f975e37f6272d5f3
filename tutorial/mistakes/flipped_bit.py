"""Mistake: trusting that torch.load notices a damaged file.

    python -m tutorial.mistakes.flipped_bit

torch.save writes a CRC of every tensor, but torch.load does not compare it. A bit that flips on a disk or on
the network becomes another weight, and the run goes on with it. Right: compute the file's SHA-256 when it is
written, keep it beside the file, and compare it before loading.
"""

import hashlib
import io
import random

import torch


def load(data: bytes, sha256: str | None) -> torch.Tensor | None:
    """The weights, or None if damage is noticed."""
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        return None
    try:
        return torch.load(io.BytesIO(data))
    except Exception:  # what is raised depends on the place of the damage
        return None


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    file, wrong, right = io.BytesIO(), 0, 0
    torch.save(torch.randn(100, 100), file)
    sha256 = hashlib.sha256(file.getvalue()).hexdigest()
    for _ in range(100):
        data = bytearray(file.getvalue())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)  # flips one bit
        wrong += load(bytes(data), None) is not None
        right += load(bytes(data), sha256) is not None
    print(f"wrong: {wrong} percent of the damaged files were loaded without an error")
    print(f"right: {right} percent of the damaged files were loaded without an error")
