"""Numba: how the CPU loops are compiled, and the order of fp32 values as integers."""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from gossamer.codecs.kernels.layout import WEYL
from gossamer.compiling import bits_of_float, compiled, from_bf16

Array = npt.NDArray[Any]

exact = compiled()
"""Without fast-math flags: decoding must give the same bits everywhere, so no fused multiply-add; NaN and inf survive."""

summing = compiled(fastmath={"reassoc", "nsz"})
"""For sums: the order is free, which lets them be vectorised; still no assumption that values are finite."""

I32_T, F32_T = ir.IntType(32), ir.FloatType()


def flipped(builder: Any, bits: Any) -> Any:
    """Bits of negative numbers inverted, but for the sign: integers then compare as the numbers do."""
    negative = builder.ashr(bits, ir.Constant(I32_T, 31))
    return builder.xor(bits, builder.and_(negative, ir.Constant(I32_T, 0x7FFFFFFF)))


def make_order(context: Any, value: Any) -> Any:
    """``order(x)``: the int32 that compares with others as the fp32 values do: −NaN < −inf < … < inf < NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return flipped(builder, builder.bitcast(arguments[0], I32_T))

    return types.int32(types.float32), generate


def make_value_of(context: Any, key: Any) -> Any:
    """``value_of(key)``: the fp32 value of an ``order`` key."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(flipped(builder, arguments[0]), F32_T)

    return types.float32(types.int32), generate


order: Any = intrinsic(make_order)
value_of: Any = intrinsic(make_value_of)

INF_KEY = np.int32(0x7F800000)


# Tensors of bfloat16 come as arrays of their bits, ``int16``. What follows is chosen by that when a loop is compiled.


def number(value: Any) -> Any:
    """Inside compiled functions: an element of a tensor of fp32 or bfloat16, as float32."""
    raise NotImplementedError


@overload(number, strict=False)  # which would compare annotations, too
def _number(value: Any) -> Any:
    return (lambda value: from_bf16(value)) if value == types.int16 else (lambda value: value)


def keep(rest: Any, i: Any, value: Any, noise: Any) -> None:
    """Inside compiled functions: write a float32 to element ``i`` of a tensor of fp32, or, rounded with the element's share of
    ``noise`` (:func:`moved_on`), of bfloat16."""
    raise NotImplementedError


@overload(keep, strict=False)
def _keep(rest: Any, i: Any, value: Any, noise: Any) -> Any:
    if rest.dtype == types.int16:

        def narrow(rest: Any, i: Any, value: Any, noise: Any) -> None:
            rest[i] = _with_noise(value, moved_on(noise, i))

        return narrow

    def as_it_is(rest: Any, i: Any, value: Any, noise: Any) -> None:
        rest[i] = value

    return as_it_is


@exact
def moved_on(noise: Any, elements: Any) -> Any:
    """Inside compiled functions: the noise so many elements later, ``uint32``."""
    return np.uint32(noise + np.uint32(np.uint32(elements) * np.uint32(WEYL)))


@exact
def _with_noise(value: Any, noise: Any) -> Any:
    """The bits of the bfloat16 number below or above: :func:`gossamer.codecs.kernels.reference.narrow`."""
    bits = bits_of_float(value)
    size = bits & np.int32(0x7FFFFFFF)
    rounded = min(size + np.int32(noise >> np.uint32(16)), INF_KEY - np.int32(1)) >> 16
    magnitude = rounded if size < INF_KEY else np.int32(0x7FC0)
    return np.int16(magnitude | ((bits >> 16) & np.int32(-0x8000)))
