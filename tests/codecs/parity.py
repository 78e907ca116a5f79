"""What kernels must have in common with the reference, which computes on the host: codes differ rarely and by one level,
decoding not at all. ``device``: where the kernels that are looked at take their tensors."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gossamer.codecs import Cast, Codec, Quantize, RandomK, Sign, TopChunks, TopK, TopPerChunk
from gossamer.codecs import kernels as kernels_module
from gossamer.codecs import quantize as quantize_module
from gossamer.codecs import sign as sign_module
from gossamer.codecs.kernels import Kernels, reference
from gossamer.codecs.kernels.layout import Blocks, Grid

SIZES = [0, 1, 2, 7, 8, 9, 65, 511, 512, 513, 1000, 2049]
SCALES = [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1.0, 1e30, 1e38]
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 3.4028234e38, -3.4028234e38]


def cases(count: int, seed: int) -> Iterator[tuple[int, random.Random, Tensor, Tensor | None]]:
    """Tensors of every size and magnitude, now and then with an outlier, not finite, or constant; maybe a residual."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for index in range(count):
        numel, scale = draw.choice([*SIZES, draw.randrange(5000)]), draw.choice(SCALES)
        x = torch.randn(numel, generator=generator).clamp(-3.3, 3.3) * scale
        residual = torch.randn(numel, generator=generator).mul(0.01) * scale if draw.random() < 0.5 else None
        if numel and draw.random() < 0.3:
            x[draw.randrange(numel)] = draw.choice(SPECIAL)
        if draw.random() < 0.1:
            x.fill_(scale)
        yield index, draw, x, residual


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit; NaN is NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(*(t.nan_to_num(0).view(torch.int32) for t in (a, b)))


def moved(tensor: Tensor | None, device: str) -> Tensor | None:
    """A copy there."""
    return None if tensor is None else tensor.to(device, copy=True)


def encoded(
    kernels: Kernels,
    kind: str,
    layout: Blocks,
    seed: int,
    x: Tensor,
    residual: Tensor | None,
    device: str = "cpu",
    kept: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    there, unsent = moved(x, device), moved(residual, device)
    payload, rest = layout.empty(there), torch.empty_like(there, dtype=kept)
    if kind == "sign":
        kernels.sign(there, unsent, layout, seed, payload, rest)
    else:
        kernels.quantize(there, unsent, layout, seed, payload, rest)
    return payload.cpu(), rest.cpu()


def decoded(
    kernels: Kernels, kind: str, layout: Blocks, payload: Tensor, total: Tensor, add: bool, device: str = "cpu"
) -> Tensor:
    there, out = moved(payload, device), moved(total, device)
    kernels.unsign(there, out, layout, add) if kind == "sign" else kernels.dequantize(there, out, layout, add)
    return out.cpu()


def codes(payload: Tensor, numel: int, layout: Blocks) -> Tensor:
    parts = reference.packed_rows(layout.split(payload, numel)[1], numel, layout)
    return torch.cat(
        [torch.empty(0, dtype=torch.int32), *(reference.unpack(part, layout.bits, 10**6).flatten() for part in parts)]
    )


def a_grid(draw: random.Random) -> Grid:
    return Grid(draw.choice([8, 4, 2]), draw.choice([1, 2]), draw.choice([8, 24, 64, 512, 1000]), draw.random() < 0.5)


def in_some_bits(draw: random.Random, residual: Tensor | None) -> tuple[Tensor | None, torch.dtype]:
    """The residual in 32 or in 16 bits, and in how many what remains is to be kept."""
    types = [torch.float32, torch.bfloat16]
    return (None if residual is None else residual.to(draw.choice(types))), draw.choice(types)


def rest_is_what_was_left_out(rest: Tensor, x: Tensor, residual: Tensor | None, values: Tensor, seed: int) -> None:
    """To the bit, rounded as the reference does if it has 16 of them; where nothing could be sent, it is the residual."""
    unsent = torch.zeros_like(x) if residual is None else residual.float()
    expected = torch.empty_like(rest)
    reference.narrow(torch.where(values.isfinite(), x + unsent - values, unsent), expected, seed)
    assert rest.isfinite().all()
    assert torch.equal(rest, expected)


def quantisation_agrees(kernels: Kernels, count: int, device: str = "cpu") -> None:
    elements, different = 0, 0
    for seed, draw, x, wide in cases(count, seed=1):
        grid, (residual, kept) = a_grid(draw), in_some_bits(draw, wide)
        theirs, _ = encoded(reference, "quantize", grid, seed, x, residual, kept=kept)
        ours, rest = encoded(kernels, "quantize", grid, seed, x, residual, device, kept)
        assert same_values(grid.split(theirs, x.numel())[0].flatten(), grid.split(ours, x.numel())[0].flatten())
        distance = (codes(theirs, x.numel(), grid) - codes(ours, x.numel(), grid)).abs()
        assert distance.sum() == (distance == 1).sum()
        elements, different = elements + x.numel(), different + int(distance.sum())
        rest_is_what_was_left_out(rest, x, residual, decoded(reference, "quantize", grid, ours, x, False), seed)
    assert elements > 0
    assert different <= 1e-4 * elements


def decoding_of_levels_is_bit_identical(kernels: Kernels, count: int, device: str = "cpu") -> None:
    _decoding_is_bit_identical(kernels, "quantize", a_grid, count, device)


def decoding_of_signs_is_bit_identical(kernels: Kernels, count: int, device: str = "cpu") -> None:
    _decoding_is_bit_identical(kernels, "sign", lambda draw: Blocks(1, 1, draw.choice([8, 24, 512, 1000])), count, device)


def _decoding_is_bit_identical(
    kernels: Kernels, kind: str, a_layout: Callable[[random.Random], Blocks], count: int, device: str
) -> None:
    for seed, draw, x, residual in cases(count, seed=2):
        layout = a_layout(draw)
        payload, _ = encoded(reference, kind, layout, seed, x, residual)
        for add in (False, True):
            total = torch.linspace(-3, 3, x.numel())
            theirs = decoded(reference, kind, layout, payload, total, add)
            assert same_values(theirs, decoded(kernels, kind, layout, payload, total, add, device))


def signs_agree(kernels: Kernels, count: int, device: str = "cpu") -> None:
    for seed, draw, x, wide in cases(count, seed=3):
        blocks, (residual, kept) = Blocks(1, 1, draw.choice([8, 24, 512, 1000])), in_some_bits(draw, wide)
        theirs, _ = encoded(reference, "sign", blocks, seed, x, residual, kept=kept)
        ours, rest = encoded(kernels, "sign", blocks, seed, x, residual, device, kept)
        (size, bits), (our_size, our_bits) = (blocks.split(p, x.numel()) for p in (theirs, ours))
        assert torch.equal(bits, our_bits)
        assert torch.allclose(size, our_size, rtol=1e-5, atol=0, equal_nan=True)
        rest_is_what_was_left_out(rest, x, residual, decoded(reference, "sign", blocks, ours, x, False), seed)


def norms_agree(kernels: Kernels, count: int, device: str = "cpu") -> None:
    for _, draw, x, residual in cases(count, seed=4):
        chunk = draw.choice([1, 7, 512, 9999])
        theirs = reference.chunk_norms(x, residual, chunk)
        ours = kernels.chunk_norms(moved(x, device), moved(residual, device), chunk).cpu()
        assert_same_norms(ours, theirs)


def accumulating_agrees(kernels: Kernels, count: int, device: str = "cpu") -> None:
    for seed, draw, x, residual in cases(count, seed=5):
        chunk, unsent = draw.choice([1, 7, 512, 9999]), torch.zeros_like(x) if residual is None else residual
        wide, kept = in_some_bits(draw, unsent)
        for in_place in (False, True):
            heard = []
            for chosen, place in ((reference, "cpu"), (kernels, device)):
                there = x.to(place, copy=True)
                out = there if in_place else torch.empty_like(there, dtype=kept)
                norms = chosen.accumulate(there, moved(wide, place), chunk, seed, out)
                heard.append((norms.cpu(), out.cpu().float(), there.cpu()))
            assert_same_norms(heard[1][0], heard[0][0])
            assert same_values(heard[1][1], heard[0][1])
            assert in_place or same_values(heard[1][2], x)


def narrowing_agrees(kernels: Kernels, count: int, device: str = "cpu") -> None:
    for seed, _, x, _ in cases(count, seed=7):
        theirs, ours = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.bfloat16, device=device)
        reference.narrow(x, theirs, seed)
        kernels.narrow(x.to(device), ours, seed)
        assert same_values(theirs.float(), ours.cpu().float())


def assert_same_norms(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, torch.float32)
    far = theirs > 1e38  # a sum near the end of the range may or may not overflow
    assert torch.allclose(ours[~far], theirs[~far], rtol=1e-5, atol=0, equal_nan=True)


def chance_moves_no_zero(kernels: Kernels, count: int, device: str = "cpu") -> None:
    """Of very many, on symmetric grids of steps of all kinds."""
    for seed in range(count):
        x = torch.zeros(16, 2**14)
        x[:, 0] = (torch.rand(16, generator=torch.Generator().manual_seed(seed)) - 0.5) * SCALES[3 + seed % 5]
        grid = Grid((8, 4, 8, 2)[seed % 4], 1, x.shape[1], stochastic=True)
        payload, rest = encoded(kernels, "quantize", grid, seed, x.flatten(), None, device)
        values = decoded(kernels, "quantize", grid, payload, x.flatten(), False, device)
        for flat in (values, rest):
            assert torch.count_nonzero(flat.view_as(x)[:, 1:]) == 0


def places_agree(kernels: Kernels, count: int, device: str = "cpu") -> None:
    """To the bit: workers that compute otherwise would not understand each other."""
    factors = torch.randint(-(2**31), 2**31, (512,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)) | 1
    for index, draw, x, _ in cases(count, seed=6):
        bits, own = draw.choice([8, 4]), x.nan_to_num(1.0, 2.0, -2.0).clamp(-1e30, 1e30)
        blocks = -(-own.numel() // 512)
        steps = (torch.rand(blocks, generator=torch.Generator().manual_seed(index)) + 0.5) * (own.abs().amax() if blocks else 1)
        steps = (steps * draw.choice([1e-1, 1e-3, 1e-6])).clamp_(min=2.0**-40)
        theirs = own + steps.repeat_interleave(512)[: own.numel()] * torch.linspace(-9, 9, own.numel())
        heard = []
        for chosen, place in ((reference, "cpu"), (kernels, device)):
            codes = torch.empty(blocks, 64 * bits, dtype=torch.uint8, device=place)
            sums = torch.empty(blocks, dtype=torch.int32, device=place)
            grid = steps.to(place), bits, factors.to(place)
            sizes = chosen.modulo_pack(theirs.to(place), *grid, codes, sums)
            written, added = torch.empty_like(own, device=place), theirs.to(place, copy=True)
            true, furthest = chosen.modulo_difference(codes, sums, own.to(place), *grid, 0.5, written, False)
            chosen.modulo_difference(codes, sums, own.to(place), *grid, 0.3, added, True)
            there = own.to(place, copy=True)
            chosen.modulo_difference(codes, sums, there, *grid, 0.5, there, False)
            assert torch.equal(there, written)
            of_all = chosen.modulo_pack(x.to(place), *grid, torch.empty_like(codes), torch.empty_like(sums))
            heard.append([codes, sums, sizes, true, furthest, written, added, of_all.nan_to_num(7.0)])
        for ours, expected in zip(heard[1], heard[0], strict=True):
            assert torch.equal(ours.cpu(), expected)
        assert bits == 4 or heard[0][3].all()


def largest_agree(kernels: Kernels, count: int, device: str = "cpu") -> None:
    """The same elements, of several that are as large the same ones."""
    for _, draw, x, _ in cases(count, seed=31):
        if not x.numel():
            continue
        if draw.random() < 0.3:
            x = x.mul(3).round_()  # many are as large as others
        chunk = draw.choice([1, 3, 64, 1000, 4096])
        wanted, last = draw.randint(1, chunk), x.numel() % chunk and draw.randint(1, x.numel() % chunk)
        there = kernels.largest(x.to(device), chunk, wanted, last).cpu()
        assert there.tolist() == reference.largest(x, chunk, wanted, last).tolist()


LAWS = [
    (quantisation_agrees, 300),
    (chance_moves_no_zero, 84),
    (decoding_of_levels_is_bit_identical, 200),
    (decoding_of_signs_is_bit_identical, 200),
    (signs_agree, 200),
    (norms_agree, 100),
    (accumulating_agrees, 100),
    (narrowing_agrees, 100),
    (places_agree, 100),
    (largest_agree, 100),
]
"""And on how many cases they are tried; where kernels are compiled anew for many of them, a seventh will do."""

CODECS: list[Codec] = [
    *(Cast(wire=wire) for wire in ("fp16", "bf16")),
    *(Quantize(bits=bits, scheme=scheme, block=64) for bits in (8, 4, 2) for scheme in ("minmax", "symmetric")),
    *(Quantize(bits=bits, rounding="stochastic", block=64) for bits in (8, 4, 2)),
    Quantize(bits=2, scheme="symmetric", rounding="stochastic", block=64),
    Sign(block=64),
    TopK(density=0.1),
    RandomK(density=0.1),
    RandomK(density=0.1, unbiased=True),
    TopChunks(density=0.2, chunk=16),
    TopPerChunk(density=0.1, chunk=64),
]


def a_codec_is_the_same(kernels: Kernels, codec: Codec, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """A payload written with one of them decodes to the same bits with the other; encoding differs rarely."""
    elements, different = 0, 0
    for seed, numel in enumerate([0, 1, 63, 64, 65, 500, 3001]):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        payloads, decoded_by = [], []
        for chosen, place in ((reference, "cpu"), (kernels, device)):
            for module in (kernels_module, quantize_module, sign_module):
                monkeypatch.setattr(module, "kernels_for", lambda kind, chosen=chosen: chosen)
            payloads.append(codec.encode(x.to(place), seed=5).cpu())
            decoded_by.append(codec.decode(payloads[0].to(place), numel, x.dtype).cpu())
        assert same_values(*decoded_by)
        both = [codec.decode(payload.to(device), numel, x.dtype).cpu() for payload in payloads]
        apart = ~torch.isclose(*both, rtol=1e-5, atol=0)
        elements, different = elements + numel, different + int(apart.sum())
    assert different <= 1e-4 * elements
