"""TopPerChunk: which elements are sent, as what, and in how many bytes."""

import numpy as np
import pytest
import torch

from gossamer.codecs import TopPerChunk

from ..contracts.cases import noise


def expected(x: np.ndarray, chunk: int, shares: list[int]) -> np.ndarray:
    """Of each chunk the largest elements; each as the mean of those of its sign that are, too, above or below the mean size."""
    kept = np.zeros(x.shape, bool)
    for number, share in enumerate(shares):
        begin = number * chunk
        kept[begin + np.argsort(-np.abs(x[begin : begin + chunk]), kind="stable")[:share]] = True
    large, found = np.abs(x) > np.abs(x[kept]).mean(), np.zeros_like(x)
    for same in (large & (x > 0), large & (x < 0), ~large & (x > 0), ~large & (x < 0)):
        if (same & kept).any():
            found[same & kept] = x[same & kept].mean()
    return found


@pytest.mark.parametrize("density", [0.01, 1 / 13, 1 / 12, 1 / 11, 0.33, 0.5, 1.0])
@pytest.mark.parametrize("numel", [1, 7, 96, 97, 100, 1000])
def test_each_chunk_sends_its_largest_elements_as_four_means(density: float, numel: int) -> None:
    """Whether places are told one by one or by a bit of each element."""
    codec, x = TopPerChunk(density=density, chunk=96), noise(1, numel, seed=numel)[0]
    shares = [max(1, int(np.ceil(round(density * min(96, numel - begin), 6)))) for begin in range(0, numel, 96)]
    found = codec.decode(codec.encode(x), numel, torch.float64)
    np.testing.assert_allclose(found.numpy(), expected(x.double().numpy(), 96, shares), rtol=0, atol=1e-6)
    assert int((found != 0).sum()) == sum(shares)


@pytest.mark.parametrize(
    ("density", "bits"), [(1 / 64, 14 / 64), (0.0625, 14 / 16), (0.125, 1.25), (0.25, 1.5), (0.5, 2.0), (1.0, 3.0)]
)
def test_what_tells_the_places_is_the_shorter_of_two(density: float, bits: float) -> None:
    """Twelve bits of each element that is sent, or one bit of each element; two bits of each that is sent; 16 bytes."""
    payload = TopPerChunk(density=density).encode(noise(1, 8 * 4096)[0])
    assert payload.numel() == 16 + 4096 * bits
