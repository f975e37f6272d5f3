import pytest
import torch

from mingpt.optim.muon import newton_schulz


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-9])  # such numbers are zero in float16
def test_newton_schulz_brings_all_singular_values_near_one(dtype: torch.dtype, size: float) -> None:
    """The iteration's coefficients are chosen to give about 0.7 to 1.2."""
    torch.manual_seed(1)
    computed = newton_schulz(size * torch.randn(5, 128, 300), dtype)
    assert computed.dtype == dtype
    values = torch.linalg.svdvals(computed.float())
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (128, 512)])
def test_a_matrix_has_the_same_bits_in_every_batch(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([newton_schulz(matrix) for matrix in matrices.split(1)])
    for size in (2, 3, 5):
        assert torch.equal(torch.cat([newton_schulz(part) for part in matrices.split(size)]), alone)
