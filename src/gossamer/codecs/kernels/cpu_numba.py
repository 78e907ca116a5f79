"""Numba: how the CPU loops are compiled, and the order of fp32 values as integers."""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.compiling import compiled

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
