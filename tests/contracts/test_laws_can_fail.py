"""Each law refuses something: algorithms and codecs that are wrong in one way, and the law that says so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs import Cast, Quantize
from gossamer.comm.ops import Flow, all_reduce, permute
from gossamer.comm.topology import dissemination
from gossamer.state import State

from . import laws
from .cases import noise


def wrong(subject: Literal["gradients", "weights"], exchange: Callable[..., Flow[Tensor]]) -> Algorithm:
    """An algorithm with this exchange."""
    cls = type(exchange.__name__, (Wrong,), {"exchange": exchange}, register=False)
    algorithm: Algorithm = cls(moves=subject)
    return algorithm


@dataclass(frozen=True, kw_only=True)
class Wrong(Algorithm, register=False):
    moves: Literal["gradients", "weights"] = "gradients"

    @property
    def traits(self) -> Traits:
        return Traits(subject=self.moves)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        raise NotImplementedError


def keeps_the_result(self, bucket, state, ctx):
    state["mean"] = yield from all_reduce(bucket.flat / ctx.world)
    return state["mean"]


def changes_the_dtype(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat.double() / ctx.world))


def reads_values(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat / max(1, int(bucket.flat.norm()))))


def divides_by_zero(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat / bucket.flat.norm() / ctx.world))


def sums_before_dividing(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat.half())).to(bucket.flat.dtype) / ctx.world


def remembers_in_place(self, bucket, state, ctx):
    if "sum" not in state:
        state["sum"] = torch.zeros_like(bucket.flat)
    mean = yield from all_reduce(bucket.flat / ctx.world)
    return state["sum"].add_(mean).clone()


def draws_at_random(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat / ctx.world * torch.rand_like(bucket.flat)))


def mixes_in_its_own(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat / ctx.world)) + 1e-3 * bucket.flat


def hides_what_is_not_finite(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat.nan_to_num(0, 0, 0) / ctx.world))


def keeps_a_tenth(self, bucket, state, ctx):
    state["residual"] = 0.1 * bucket.flat
    return (yield from all_reduce(0.9 * bucket.flat / ctx.world))


def is_not_the_mean(self, bucket, state, ctx):
    return (yield from all_reduce(bucket.flat / (ctx.world + 1)))


def loses_rounding(self, bucket, state, ctx):
    theirs = yield from permute(bucket.flat.bfloat16(), dissemination(ctx.step, ctx.world))
    return (theirs.to(bucket.flat.dtype) - bucket.flat) / 2


def stays_apart(self, bucket, state, ctx):
    yield from permute(bucket.flat, dissemination(ctx.step, ctx.world))
    return torch.zeros_like(bucket.flat)


WORLD = 3
SHAPES = [(37,)]


@pytest.mark.parametrize(
    ("exchange", "law"),
    [
        (keeps_the_result, lambda a: laws.result_is_like_the_bucket(a, WORLD, SHAPES, torch.float32)),
        (changes_the_dtype, lambda a: laws.result_is_like_the_bucket(a, WORLD, SHAPES, torch.float32)),
        (reads_values, lambda a: laws.meta_tensors_suffice(a, WORLD)),
        (divides_by_zero, lambda a: laws.nothing_stays_nothing(a, WORLD)),
        (sums_before_dividing, lambda a: laws.a_huge_value_stays_finite(a, WORLD)),
        (remembers_in_place, lambda a: laws.an_abandoned_exchange_loses_nothing(a, WORLD)),
        (draws_at_random, lambda a: laws.the_same_again_gives_the_same_bits(a, WORLD)),
        (mixes_in_its_own, lambda a: laws.all_ranks_hold_the_same_bits(a, WORLD, torch.float32)),
        (hides_what_is_not_finite, lambda a: laws.non_finite_values_reach_all_ranks_and_no_state(a, WORLD, float("nan"))),
        (keeps_a_tenth, lambda a: laws.among_one_nothing_is_kept_back(a, torch.float32)),
        (is_not_the_mean, lambda a: laws.the_result_is_the_mean(a, WORLD, torch.float32)),
        (loses_rounding, lambda a: laws.the_mean_of_the_weights_is_kept(a, WORLD)),
        (loses_rounding, lambda a: laws.equal_weights_are_left_alone(a, WORLD, torch.float32)),
        (stays_apart, lambda a: laws.weights_come_closer(a, WORLD)),
        (stays_apart, lambda a: laws.a_non_finite_weight_is_seen_by_others(a, WORLD)),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_wrong_algorithm_is_found(exchange: Callable[..., Any], law: Callable[[Algorithm], None]) -> None:
    subject = "weights" if exchange in (loses_rounding, stays_apart) else "gradients"
    with pytest.raises((AssertionError, RuntimeError)):
        law(wrong(subject, exchange))


class Coarse(Cast):
    """States a bound that it does not keep."""

    def error_bound(self, tensor: Tensor) -> Tensor:
        return super().error_bound(tensor) / 4


class Alias(Cast):
    """Sends the tensor itself."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return tensor


class Cleaning(Cast):
    """Hides what is not finite."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return super().decode(payload, numel, dtype).nan_to_num(0, 0, 0)


class Restless(Cast):
    """Decodes something else every time."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return super().decode(payload, numel, dtype) + torch.rand(payload.shape)


class Wide(Cast):
    """Sends more than it was given."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return tensor.double()


class Stubborn(Cast):
    """Decodes to its own type."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return payload


class Sparse(Cast):
    """Sends as much as the values ask for."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return tensor[: int((tensor != 0).sum()) // 2].clone()


class Drawing(Cast):
    """Draws from the global generator."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return super().encode(tensor + torch.rand(()), seed)


class Absorbing(Cast):
    """Keeps whatever is left."""

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        wanted = tensor if residual is None else tensor + residual
        payload = self.encode(wanted)
        return payload, wanted - self.decode(payload, wanted.numel(), wanted.dtype)


class Forgetful(Cast):
    """Keeps half of what is left."""

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        payload, rest = super().encode_rest(tensor, residual, seed)
        return payload, rest / 2


class Doubling(Cast):
    """Adds twice."""

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        super().add_decoded(payload, total)
        super().add_decoded(payload, total)


class Squared(Cast):
    """Leaves out the square root."""

    def norm(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return super().norm(payload, numel, dtype).square()


class Hasty(Cast):
    """Clears the rest before it has read the tensor."""

    def encode_keeping(self, tensor: Tensor, residual: Tensor | None, seed: int, rest: Tensor) -> Tensor:
        rest.zero_()
        return super().encode_keeping(tensor, residual, seed, rest)


class Downward(Quantize):
    """Claims to be unbiased, and always rounds down."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return super().encode(tensor - 0.2, seed)


class Misaligned(Quantize):
    """Reads the payload from where memory begins, not from where the payload does."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return super().decode(payload.as_strided(payload.shape, (1,), 0), numel, dtype)


@pytest.mark.parametrize(
    ("codec", "law"),
    [
        (Coarse, laws.decoding_is_within_the_bound),
        (Alias, laws.the_payload_is_fresh_contiguous_and_no_longer),
        (Wide, laws.the_payload_is_fresh_contiguous_and_no_longer),
        (Restless, laws.decoding_is_a_function_of_the_payload),
        (Stubborn, laws.every_dtype_decodes),
        (Cleaning, lambda codec, tensor: laws.non_finite_stays_visible(codec, tensor, float("nan"))),
        (Sparse, laws.meta_payloads_have_the_real_shape),
        (Drawing, laws.the_same_seed_gives_the_same_payload),
        (Absorbing, lambda codec, tensor: laws.the_rest_stays_finite(codec, tensor, float("inf"))),
        (Cleaning, lambda codec, tensor: laws.the_rest_stays_finite(codec, tensor, float("nan"))),
        (Forgetful, laws.sent_and_kept_is_what_it_had),
        (Forgetful, laws.error_feedback_loses_nothing),
        (Doubling, laws.adding_is_decoding_and_adding),
        (Squared, laws.the_norm_is_that_of_what_is_decoded),
        (Hasty, laws.the_rest_may_take_the_place_of_the_tensor),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_wrong_codec_is_found(codec: type[Cast], law: Callable[..., None]) -> None:
    law_holds_for = Cast(wire="fp16")
    law(law_holds_for, noise(1, 65)[0])
    with pytest.raises((AssertionError, RuntimeError)):
        law(codec(wire="fp16"), noise(1, 65)[0])


@pytest.mark.parametrize(
    ("codec", "law"),
    [
        (Downward, laws.the_mean_over_seeds_is_the_tensor),
        (Misaligned, laws.decoding_is_a_function_of_the_payload),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_wrong_quantisation_is_found(codec: type[Quantize], law: Callable[..., None]) -> None:
    law(Quantize(rounding="stochastic"), noise(1, 65)[0])
    with pytest.raises(AssertionError):
        law(codec(rounding="stochastic"), noise(1, 65)[0])
