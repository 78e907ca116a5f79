"""One battery over every codec."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.codecs import Codec, ErrorFeedback, Quantize, RandomK, Sign, TopChunks, TopK, TopPerChunk

from . import laws
from .cases import all_codecs, noise

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 7, 8, 1023]

FURTHER = [
    Quantize(bits=2, scheme="symmetric", rounding="stochastic"),
    Quantize(bits=4, block=24, rounding="stochastic"),
    Sign(block=8),
    TopK(density=1),
    RandomK(density=0.3, unbiased=True),
    TopChunks(density=0.4, chunk=7),
    TopPerChunk(density=0.3, chunk=7),
    ErrorFeedback(Sign(block=64)),
    ErrorFeedback(TopChunks(chunk=16), residual="bf16"),
]
CODECS = [*all_codecs(), *FURTHER]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Every size, three magnitudes, zeros and one outlier."""
    tensors = [noise(1, n, dtype, seed=n)[0] * scale for n in SIZES for scale in (1.0, 1e-4, 300.0)]
    outlier = noise(1, 65, dtype)[0]
    outlier[7] = 6e4
    return [*tensors, torch.zeros(9, dtype=dtype), outlier]


@every_codec
@every_dtype
@pytest.mark.parametrize(
    "law",
    [
        laws.decoding_is_within_the_bound,
        laws.decoding_is_a_function_of_the_payload,
        laws.the_payload_is_fresh_contiguous_and_no_longer,
        laws.every_dtype_decodes,
        laws.meta_payloads_have_the_real_shape,
        laws.the_same_seed_gives_the_same_payload,
        laws.sent_and_kept_is_what_it_had,
        laws.adding_is_decoding_and_adding,
        laws.the_norm_is_that_of_what_is_decoded,
        laws.the_rest_may_take_the_place_of_the_tensor,
        laws.error_feedback_loses_nothing,
    ],
    ids=lambda law: law.__name__,
)
def test_law(codec: Codec, dtype: torch.dtype, law: object) -> None:
    for tensor in inputs(dtype):
        law(codec, tensor)  # type: ignore[operator]


@every_codec
@every_dtype
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_stays_visible(codec: Codec, dtype: torch.dtype, poison: float) -> None:
    for tensor in inputs(dtype):
        if tensor.numel():
            laws.non_finite_stays_visible(codec, tensor, poison)
            laws.the_rest_stays_finite(codec, tensor, poison)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.unbiased], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_unbiased(codec: Codec, dtype: torch.dtype) -> None:
    for numel in (1, 65):
        laws.the_mean_over_seeds_is_the_tensor(codec, noise(1, numel, dtype)[0])


@every_codec
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-6e4, 6e4), min_size=1, max_size=40), st.sampled_from([torch.float64, torch.float32]))
def test_any_values_decode_within_the_bound(codec: Codec, values: list[float], dtype: torch.dtype) -> None:
    laws.decoding_is_within_the_bound(codec, torch.tensor(values, dtype=dtype))
