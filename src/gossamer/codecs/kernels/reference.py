"""Reference kernels: what every kernel computes, in plain torch, on any device (``meta`` included)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.codecs.kernels.layout import (
    HUGE,
    M1,
    M2,
    MASK,
    SHIFT1,
    SHIFT2,
    SHRINK,
    TINY,
    WEYL,
    Blocks,
    Grid,
    Keys,
    keys,
    noise_key,
    signed,
)
from gossamer.codecs.rounding import finite_or, in_blocks
from gossamer.memory import portion


def rows(flat: Tensor, block: int) -> list[Tensor]:
    """Whole blocks as one matrix, and the short last block as another; views of ``flat``."""
    whole = flat.numel() - flat.numel() % block
    return [part for part in (flat[:whole].view(-1, block), flat[whole:].view(1, -1)) if part.numel()]


def packed_rows(codes: Tensor, numel: int, blocks: Blocks) -> list[Tensor]:
    """The bytes of :func:`rows`."""
    whole = numel - numel % blocks.block
    end = blocks.code_bytes(whole)
    return [part for part in (codes[:end].view(-1, blocks.code_bytes(blocks.block)), codes[end:].view(1, -1)) if part.numel()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """``uint8[blocks, ceil(length·bits/8)]`` from ``int32[blocks, length]``: planes into bytes."""
    m = -(-codes.shape[1] * bits // 8)
    packed, *planes = pad(codes.to(torch.uint8), (0, 8 // bits * m - codes.shape[1])).tensor_split(8 // bits, dim=1)
    for number, plane in enumerate(planes, start=1):
        packed = packed | plane << bits * number  # in bytes: a sum of integers takes three times as long
    return packed


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """``int32[blocks, length]``: the reverse of :func:`pack`."""
    planes = packed.int().unsqueeze(1) >> shifts(packed, bits) & ((1 << bits) - 1)
    return planes.flatten(1)[:, :length]


def shifts(like: Tensor, bits: int) -> Tensor:
    """How far the codes of each plane are shifted, ``int32[1, planes, 1]``."""
    return torch.arange(0, 8, bits, dtype=torch.int32, device=like.device).view(1, -1, 1)


# -- quantisation ---------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Fill ``payload`` with ``x + residual`` and ``rest`` with what that leaves out, by :func:`narrow` if it is bfloat16
    (None: not wanted).

    A block with a NaN or inf becomes NaN as a whole, and its rest is the residual as it was.
    """
    wanted = x if residual is None else x + residual
    header, packed = grid.split(payload, x.numel())
    places = zip(rows(wanted, grid.block), packed_rows(packed, x.numel(), grid), strict=True)
    first = 0
    for w, bytes_ in places:
        lo, half, place = places_of(w, grid)
        header[:, first : first + len(w)] = 2 * half if grid.symmetric else torch.stack([lo, half])
        bytes_.copy_(pack(choose(place, first * grid.block, grid, seed), grid.bits))
        first += len(w)
    if rest is not None:
        narrow(finite_or(wanted - decoded(payload, x.numel(), grid), residual), rest, seed)


def places_of(w: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Lowest level and half a step of each block, NaN if it is not finite; and where its elements stand, 0 … top."""
    lo, hi = w.amin(1), w.amax(1)
    if grid.symmetric:
        hi = torch.maximum(-lo, hi)
        lo = -hi
    poison = torch.where(torch.isfinite(lo) & torch.isfinite(hi), 0.0, float("nan"))
    reach = hi * 0.5 - lo * 0.5
    half = reach * grid.inverse + poison
    up = torch.where(reach > HUGE, 0.25, torch.where(reach < TINY, 2.0**64, 1.0))
    up = torch.where(half == 0, 1.0, up)
    inv = torch.where(half == 0, 0.0, 1.0 / (half * 2 * up))
    lo = lowest(half, grid) if grid.symmetric else lo + poison
    if grid.symmetric:  # counted from the middle, so that 0 stands on it: a rounding beside it, chance would move some zeros
        place = w * up[:, None] * inv[:, None] + grid.top // 2
    else:
        place = (w * up[:, None] - (lo * up)[:, None]) * inv[:, None]
    return lo, half, place.clamp(0, grid.top).nan_to_num(0)


def lowest(half: Tensor, grid: Grid) -> Tensor:
    """The lowest level of a symmetric grid."""
    return -(half * 2 * (grid.top // 2))


def choose(place: Tensor, first: int, grid: Grid, seed: int) -> Tensor:
    """The codes, ``int32``, of elements that stand between levels; the first of them is element ``first``."""
    if not grid.stochastic:
        return (place + 0.5).int()
    below = place.int()
    chance = uniform(place.numel(), first, seed, place.device).view(place.shape)
    return below + (chance < place - below).int()


def uniform(numel: int, first: int, seed: int, device: torch.device) -> Tensor:
    """``float32[numel]`` in [0, 1): :func:`hashed` · 2⁻²⁴."""
    return hashed(numel, first, keys(seed), device).float() * 2.0**-24


def hashed(numel: int, first: int, words: Keys, device: torch.device) -> Tensor:
    """``int64[numel]`` from 0 to 2²⁴ − 1: a hash of a seed's :func:`keys` and each element's index, from ``first`` on."""
    key1, key2 = words
    mixed = torch.arange(first, first + numel, device=device) & MASK ^ key1
    mixed = ((mixed ^ mixed >> SHIFT1) * M1 + key2) & MASK
    mixed = (mixed ^ mixed >> SHIFT2) * M2 & MASK
    return (mixed ^ mixed >> 16) >> 8


def decoded(payload: Tensor, numel: int, grid: Grid) -> Tensor:
    """The values of a payload, ``float32[numel]``."""
    header, packed = grid.split(payload, numel)
    half = header[0] * 0.5 if grid.symmetric else header[1]
    lo = lowest(half, grid) if grid.symmetric else header[0]
    values, first = [header.new_empty(0)], 0
    for bytes_ in packed_rows(packed, numel, grid):
        blocks = slice(first, first + len(bytes_))
        part = unpack(bytes_, grid.bits, min(grid.block, numel - first * grid.block)) * half[blocks, None]
        values.append(((lo[blocks, None] + part) + part).flatten())
        first += len(bytes_)
    return torch.cat(values)


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    """Write the values of a payload to ``out`` (``float32[n]``), or add them to it."""
    values = decoded(payload, out.numel(), grid)
    out.add_(values) if add else out.copy_(values)


# -- sign and size --------------------------------------------------------------------------------------------------------


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Fill ``payload`` with the signs of ``x + residual`` and each block's mean absolute value, and ``rest`` as above."""
    wanted = x if residual is None else x + residual
    header, packed = blocks.split(payload, x.numel())
    first = 0
    for w, bytes_ in zip(rows(wanted, blocks.block), packed_rows(packed, x.numel(), blocks), strict=True):
        header[0, first : first + len(w)] = mean_size(w)
        bytes_.copy_(pack((w < 0).int(), 1))
        first += len(w)
    if rest is not None:
        narrow(finite_or(wanted - unsigned(payload, x.numel(), blocks), residual), rest, seed)


def mean_size(w: Tensor) -> Tensor:
    """Mean absolute value of each row, without overflow; NaN if there is a NaN or inf."""
    size = w.abs().sum(1) * (1 / w.shape[1])
    size = torch.where(size.isfinite(), size, (w.abs() * (SHRINK / w.shape[1])).sum(1))
    return torch.where(size.isfinite(), size, float("nan"))


def unsigned(payload: Tensor, numel: int, blocks: Blocks) -> Tensor:
    """The values of a payload of signs, ``float32[numel]``."""
    header, packed = blocks.split(payload, numel)
    values, first = [header.new_empty(0)], 0
    for bytes_ in packed_rows(packed, numel, blocks):
        size = header[0, first : first + len(bytes_), None]
        negative = unpack(bytes_, 1, min(blocks.block, numel - first * blocks.block)).bool()
        values.append(torch.where(negative, -size, size).flatten())
        first += len(bytes_)
    return torch.cat(values)


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    """Write the values of a payload of signs to ``out`` (``float32[n]``), or add them to it."""
    values = unsigned(payload, out.numel(), blocks)
    out.add_(values) if add else out.copy_(values)


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    """``float32[ceil(n/chunk)]``: the sum of |x + residual| over each chunk; NaN or inf where the chunk has one."""
    wanted = x if residual is None else x + residual
    return torch.cat([x.new_empty(0), *(part.abs().sum(1) for part in rows(wanted, chunk))])


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    """Write ``x + residual`` to ``out`` (which may be ``x``), by :func:`narrow` if that is bfloat16.

    Returns ``float32[ceil(n/chunk)]``: the sum of |x + residual + x| over each chunk.
    """
    after = x + residual
    norms = chunk_norms(after, x, chunk)
    narrow(after, out, seed)
    return norms


# -- fewer bits -----------------------------------------------------------------------------------------------------------


def narrow(values: Tensor, out: Tensor, seed: int) -> None:
    """Write fp32 ``values`` to ``out``: as they are, or as bfloat16 numbers, above or below at random, so that the mean over
    the seeds is the value. What would become inf becomes the largest number; what is not finite, NaN."""
    if out.dtype != torch.bfloat16:
        out.copy_(values)
        return
    places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    noise = places * signed(WEYL) + signed(noise_key(seed)) >> 16 & 0xFFFF  # sums and products wrap around
    bits = values.contiguous().view(torch.int32)
    size = bits & 0x7FFFFFFF
    rounded = torch.where(size < INF, (size + noise).clamp_(max=INF - 1) >> 16, NAN >> 16)
    out.copy_((rounded | bits >> 16 & -0x8000).to(torch.int16).view(torch.bfloat16))


INF, NAN = 0x7F800000, 0x7FC00000
"""Their bits."""


# -- the last bits of places ----------------------------------------------------------------------------------------------


def modulo_pack(values: Tensor, steps: Tensor, bits: int, factors: Tensor, codes: Tensor, sums: Tensor) -> Tensor:
    """Fill ``codes`` (``uint8[blocks, length·bits/8]``) with the last bits of each value's place, the nearest whole number of
    its block's ``steps``; and ``sums`` (``int32[blocks]``) with :func:`checksum` of each block's places. ``factors``:
    ``int32[length]``; the last block may be shorter, and is filled up with zeros. Returns ``[blocks]``: the largest magnitudes.
    """
    sizes = torch.empty_like(steps)
    for elements, rows in pieces(values, len(factors)):
        places = _places(values[elements], steps[rows], factors)
        codes[rows] = pack(places & (2**bits - 1), bits)
        sums[rows] = checksum(places, factors)
        sizes[rows] = in_blocks(values[elements], len(factors)).abs().amax(dim=1)  # on a CPU 20 times as fast as the norm
    return sizes


def modulo_difference(
    codes: Tensor, sums: Tensor, own: Tensor, steps: Tensor, bits: int, factors: Tensor, share: float, out: Tensor, add: bool
) -> tuple[Tensor, Tensor]:
    """How far the places that were packed are from those of ``own``, taking of all with these last bits the nearest; as whole
    numbers times the step, times ``share``, it is written to ``out`` (which may be ``own``), or added. Returns which blocks'
    places are the sender's, ``bool[blocks]``, and the longest way in each, without the share: ``[blocks]``."""
    true, furthest, half = torch.empty_like(steps, dtype=torch.bool), torch.empty_like(steps), 2 ** (bits - 1)
    for elements, rows in pieces(own, len(factors)):
        places = _places(own[elements], steps[rows], factors)
        ahead = ((unpack(codes[rows], bits, len(factors)) - places + half) & (2**bits - 1)) - half
        true[rows] = checksum(places + ahead, factors) == sums[rows]
        ways = ahead * steps[rows].unsqueeze(1)
        furthest[rows] = ways.abs().amax(dim=1)
        place, flat = out[elements], ways.view(-1)[: own[elements].numel()].mul_(share)
        place.add_(flat) if add else place.copy_(flat)
    return true, furthest


def pieces(tensor: Tensor, block: int) -> Iterator[tuple[slice, slice]]:
    """A flat tensor's elements, and their blocks, so many at a time that a CPU keeps them in its cache."""
    size = portion(tensor) // block * block
    for begin in range(0, max(1, tensor.numel()), size):
        end = min(begin + size, tensor.numel())
        yield slice(begin, end), slice(begin // block, -(-end // block))


def checksum(places: Tensor, factors: Tensor) -> Tensor:
    """A linear hash of each block: ``int32[blocks]``. Places that are wrong by whole turns, some up and some down, change it:
    each counts with a random factor of its own. Sums and products wrap around."""
    return (places * factors).sum(dim=1, dtype=torch.int32)


def _places(values: Tensor, steps: Tensor, factors: Tensor) -> Tensor:
    """``int32[blocks, length]``: a value is about place · step."""
    return (in_blocks(values, len(factors)) * (1 / steps).unsqueeze(1)).round_().to(torch.int32)


# -- the largest of each chunk --------------------------------------------------------------------------------------------


def largest(x: Tensor, chunk: int, count: int, last: int) -> Tensor:
    """``int16[m]``: where in each chunk its ``count`` elements of largest size are, in order; of a shorter last one ``last``.

    Of elements of one size the first ones; NaN is as large as inf.
    """
    sizes = x.abs()
    sizes = torch.where(sizes.isnan(), float("inf"), sizes)
    found = []
    for rows_, wanted in zip(rows(sizes, chunk), [count, last] if x.numel() >= chunk else [last], strict=False):
        order = torch.sort(rows_, dim=1, descending=True, stable=True).indices[:, :wanted]
        found.append(order.sort(dim=1).values.flatten())
    return torch.cat(found).to(torch.int16)
