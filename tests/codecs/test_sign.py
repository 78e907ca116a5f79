"""Sign: a bit and a mean size."""

import pytest
import torch

from gossamer.codecs import Sign
from gossamer.errors import ConfigurationError


def through(codec: Sign, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)


def test_each_block_has_its_own_mean_size() -> None:
    tensor = torch.tensor([1.0, -3.0, 1.0, -3.0, 1.0, -3.0, 1.0, -3.0, 10.0, -20.0])
    assert through(Sign(block=8), tensor).tolist() == [2.0, -2.0] * 4 + [15.0, -15.0]


def test_huge_and_tiny_values_have_a_mean() -> None:
    huge = torch.full((1000,), 3.4e38)
    assert torch.allclose(through(Sign(block=512), huge), huge, rtol=1e-5)
    tiny = torch.full((1000,), -1e-40)
    assert torch.allclose(through(Sign(block=512), tiny), tiny, rtol=1e-3)


def test_payloads_are_as_small_as_said() -> None:
    assert Sign(block=512).encode(torch.zeros(1025)).numel() == 3 * 4 + 129


def test_only_the_poisoned_block_is_lost() -> None:
    tensor = torch.ones(20)
    tensor[9] = float("inf")
    assert through(Sign(block=8), tensor).isnan().tolist() == [False] * 8 + [True] * 8 + [False] * 4


@pytest.mark.parametrize("block", [0, -8, 7, 1.5, None, True, 2**14 + 8])
def test_bad_blocks_are_refused(block: object) -> None:
    with pytest.raises(ConfigurationError, match="block must be a multiple of 8 elements, from 8 to 16384"):
        Sign(block=block)
