"""Quantize: ranges that fp32 arithmetic stumbles over, what is exact, what is refused."""

import itertools

import pytest
import torch
from torch import Tensor

from gossamer.codecs import Quantize
from gossamer.codecs.kernels import reference
from gossamer.errors import ConfigurationError

F32_MAX = torch.finfo(torch.float32).max
ALL = [
    Quantize(bits=bits, scheme=scheme, rounding=rounding)
    for bits, scheme, rounding in itertools.product((8, 4, 2), ("minmax", "symmetric"), ("nearest", "stochastic"))
]

RANGES = {
    "both ends of fp32": torch.tensor([F32_MAX, -F32_MAX, 0.0, 1.0, -1e30]),
    "one huge": torch.tensor([1e-3, F32_MAX, -1e-3]),
    "subnormal": torch.arange(-20, 20) * 1e-45,
    "subnormal and normal": torch.tensor([1e-45, 1e-38, -3e-39, 0.0]),
    "two neighbours": torch.tensor([1.0, 1.0 + 2**-23] * 9),
    "far from zero": torch.linspace(1e6, 1e6 + 1, 33),
    "huge and equal": torch.full((9,), -F32_MAX),
    "both zeros": torch.tensor([0.0, -0.0]),
}


def through(codec: Quantize, tensor: Tensor) -> Tensor:
    return codec.decode(codec.encode(tensor, seed=1), tensor.numel(), tensor.dtype)


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("tensor", RANGES.values(), ids=RANGES.keys())
def test_every_range_is_finite_and_within_a_step(codec: Quantize, tensor: Tensor) -> None:
    decoded = through(codec, tensor)
    assert decoded.isfinite().all()
    lo, hi = tensor.double().min(), tensor.double().max()
    reach = 2 * tensor.double().abs().max() if codec.scheme == "symmetric" else hi - lo
    step = reach / (2**codec.bits - (2 if codec.scheme == "symmetric" else 1))
    slack = 2e-6 * reach + 3e-7 * tensor.double().abs().max() + 1e-42
    share = 0.5 if codec.rounding == "nearest" else 1.0
    assert ((decoded.double() - tensor.double()).abs() <= share * step + slack).all()
    assert ((decoded.double() - tensor.double()).abs() <= codec.error_bound(tensor)).all()


def test_the_bound_is_tight() -> None:
    """The error comes within a few per cent of the bound, so that the bound is not merely large."""
    for codec in ALL:
        tensor = torch.rand(4096, generator=torch.Generator().manual_seed(0)) - 0.5
        assert ((through(codec, tensor) - tensor).abs() / codec.error_bound(tensor)).max() > 0.9


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-45, -3e38, 65504.0])
def test_a_constant_block_is_exact(codec: Quantize, value: float) -> None:
    tensor = torch.full((700,), value)
    if codec.scheme == "minmax":
        assert torch.equal(through(codec, tensor), tensor)
    else:
        assert torch.allclose(through(codec, tensor), tensor, rtol=1e-6, atol=1e-42)


def test_a_symmetric_grid_keeps_zeros() -> None:
    tensor = torch.randn(513, generator=torch.Generator().manual_seed(0))
    tensor[::3] = 0
    for bits in (8, 4, 2):
        assert torch.count_nonzero(through(Quantize(bits=bits, scheme="symmetric"), tensor)[::3]) == 0


@pytest.mark.parametrize("codec", [codec for codec in ALL if codec.scheme == "symmetric"], ids=repr)
def test_zero_stands_on_the_middle_of_every_symmetric_grid(codec: Quantize) -> None:
    """To the bit: stochastic rounding would move some of the zeros that stand beside it."""
    largest = 10 ** (torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 83 - 45)
    blocks = largest.float()[:, None] * torch.tensor([1.0, 0.0, -0.0, -1.0])
    _, _, place = reference.places_of(blocks, codec.grid)
    assert (place[:, 1:3] == codec.grid.top // 2).all()
    normal = blocks[:, 0] > 1e-33  # steps of smaller numbers have few bits
    assert (place[normal][:, [0, 3]] == torch.tensor([codec.grid.top, 0])).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_only_the_poisoned_block_is_lost(poison: float) -> None:
    tensor = torch.ones(1000)
    tensor[600] = poison
    assert through(Quantize(), tensor).isnan().tolist() == [False] * 512 + [True] * 488


def test_payloads_are_as_small_as_said() -> None:
    for bits in (8, 4, 2):
        assert Quantize(bits=bits).encode(torch.zeros(1025)).numel() == 3 * 8 + -(-1025 * bits // 8)
        assert Quantize(bits=bits, scheme="symmetric").encode(torch.zeros(1025)).numel() == 3 * 4 + -(-1025 * bits // 8)


def test_other_views_of_memory_encode_alike() -> None:
    tensor = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    column, copy = tensor[:, 3], tensor[:, 3].clone()
    assert torch.equal(Quantize().encode(column), Quantize().encode(copy))
    total, expected = torch.zeros(20, 2), torch.zeros(20)
    Quantize().add_decoded(Quantize().encode(copy), total[:, 1])
    Quantize().add_decoded(Quantize().encode(copy), expected)
    assert torch.equal(total[:, 1], expected)
    assert torch.equal(Quantize().encode(torch.nn.Parameter(copy)), Quantize().encode(copy))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits must be one of 8, 4, 2; got 3"),
        ({"bits": "8"}, "bits must be one of"),
        ({"bits": 8.0}, "bits must be one of 8, 4, 2; got 8.0"),
        ({"scheme": "max"}, "scheme must be one of minmax, symmetric; got 'max'"),
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic; got 'up'"),
        ({"block": 12}, "block must be a multiple of 8 elements, from 8 to 16384; got 12"),
        ({"block": 2**14 + 8}, "from 8 to 16384; got 16392"),
        ({"block": 0}, "multiple of 8"),
        ({"block": -8}, "multiple of 8"),
        ({"block": 8.0}, "multiple of 8"),
        ({"block": True}, "multiple of 8"),
    ],
)
def test_bad_fields_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Quantize(**fields)
