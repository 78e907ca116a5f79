"""Kernels: all of them do what the reference does. Codes differ rarely and by one level, decoding not at all."""

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gossamer.codecs import Cast, Codec, Quantize, RandomK, Sign, TopChunks, TopK, chunk_norms
from gossamer.codecs import kernels as kernels_module
from gossamer.codecs import quantize as quantize_module
from gossamer.codecs import sign as sign_module
from gossamer.codecs.kernels import COMPILERS, Kernels, accumulate, kernels_for, kernels_named, reference
from gossamer.codecs.kernels.layout import Blocks, Grid

SIZES = [0, 1, 2, 7, 8, 9, 65, 511, 512, 513, 1000, 2049]
SCALES = [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1.0, 1e30, 1e38]
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 3.4028234e38, -3.4028234e38]


def fast(name: str) -> Kernels:
    """Kernels of this name that can run on CPU tensors: triton in its interpreter, in a process started for that."""
    pytest.importorskip(COMPILERS[name], reason=f"{COMPILERS[name]} is not installed")
    if name == "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton runs on CPU tensors only in its interpreter; test_triton_interpreted starts it")
    return kernels_named(name)


kernel_users = (kernels_module, quantize_module, sign_module)

every_kernel = pytest.mark.parametrize("name", list(COMPILERS))


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


def encoded(
    kernels: Kernels, kind: str, layout: Blocks, seed: int, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    payload, rest = layout.empty(x), torch.empty_like(x)
    if kind == "sign":
        kernels.sign(x, residual, layout, payload, rest)
    else:
        kernels.quantize(x, residual, layout, seed, payload, rest)
    return payload, rest


def decoded(kernels: Kernels, kind: str, layout: Blocks, payload: Tensor, total: Tensor, add: bool) -> Tensor:
    out = total.clone()
    kernels.unsign(payload, out, layout, add) if kind == "sign" else kernels.dequantize(payload, out, layout, add)
    return out


def codes(payload: Tensor, numel: int, layout: Blocks) -> Tensor:
    parts = reference.packed_rows(layout.split(payload, numel)[1], numel, layout)
    return torch.cat(
        [torch.empty(0, dtype=torch.int32), *(reference.unpack(part, layout.bits, 10**6).flatten() for part in parts)]
    )


def a_grid(draw: random.Random) -> Grid:
    return Grid(draw.choice([8, 4, 2]), draw.choice([1, 2]), draw.choice([8, 24, 64, 512, 1000]), draw.random() < 0.5)


@every_kernel
def test_quantisation_agrees(name: str) -> None:
    kernels, elements, different = fast(name), 0, 0
    for seed, draw, x, residual in cases(300 if name == "cpu" else 40, seed=1):
        grid = a_grid(draw)
        (theirs, _), (ours, rest) = (encoded(k, "quantize", grid, seed, x, residual) for k in (reference, kernels))
        assert same_values(grid.split(theirs, x.numel())[0].flatten(), grid.split(ours, x.numel())[0].flatten())
        distance = (codes(theirs, x.numel(), grid) - codes(ours, x.numel(), grid)).abs()
        assert distance.sum() == (distance == 1).sum()
        elements, different = elements + x.numel(), different + int(distance.sum())
        assert rest.isfinite().all()
        wanted = x if residual is None else x + residual
        values = decoded(reference, "quantize", grid, ours, x, False)
        assert torch.equal(rest[values.isfinite()], (wanted - values)[values.isfinite()])
        assert torch.equal(rest[values.isnan()], (torch.zeros_like(x) if residual is None else residual)[values.isnan()])
    assert elements > 0
    assert different <= 1e-4 * elements


@every_kernel
@pytest.mark.parametrize("kind", ["quantize", "sign"])
def test_decoding_is_bit_identical(name: str, kind: str) -> None:
    kernels = fast(name)
    for seed, draw, x, residual in cases(200 if name == "cpu" else 40, seed=2):
        layout = a_grid(draw) if kind == "quantize" else Blocks(1, 1, draw.choice([8, 24, 512, 1000]))
        payload, _ = encoded(reference, kind, layout, seed, x, residual)
        for add in (False, True):
            total = torch.linspace(-3, 3, x.numel())
            both = [decoded(k, kind, layout, payload, total, add) for k in (reference, kernels)]
            assert same_values(*both)


@every_kernel
def test_signs_agree(name: str) -> None:
    kernels = fast(name)
    for seed, draw, x, residual in cases(200 if name == "cpu" else 40, seed=3):
        blocks = Blocks(1, 1, draw.choice([8, 24, 512, 1000]))
        (theirs, _), (ours, rest) = (encoded(k, "sign", blocks, seed, x, residual) for k in (reference, kernels))
        (size, bits), (our_size, our_bits) = (blocks.split(p, x.numel()) for p in (theirs, ours))
        assert torch.equal(bits, our_bits)
        assert torch.allclose(size, our_size, rtol=1e-5, atol=0, equal_nan=True)
        values = decoded(reference, "sign", blocks, ours, x, False)
        wanted = x if residual is None else x + residual
        assert rest.isfinite().all()
        assert torch.equal(rest[values.isfinite()], (wanted - values)[values.isfinite()])


@every_kernel
def test_norms_agree(name: str) -> None:
    kernels = fast(name)
    for _, draw, x, residual in cases(100 if name == "cpu" else 20, seed=4):
        chunk = draw.choice([1, 7, 512, 9999])
        theirs, ours = (k.chunk_norms(x, residual, chunk) for k in (reference, kernels))
        assert (ours.shape, ours.dtype) == ((-(-x.numel() // chunk),), torch.float32)
        far = theirs > 1e38  # a sum near the end of the range may or may not overflow
        assert torch.allclose(ours[~far], theirs[~far], rtol=1e-5, atol=0, equal_nan=True)


@every_kernel
def test_accumulating_agrees(name: str) -> None:
    kernels = fast(name)
    for _, draw, x, residual in cases(100 if name == "cpu" else 20, seed=5):
        chunk, owed = draw.choice([1, 7, 512, 9999]), torch.zeros_like(x) if residual is None else residual
        sums = [x.clone(), x.clone()]
        theirs, ours = (k.accumulate(sum_, owed, chunk) for k, sum_ in zip((reference, kernels), sums, strict=True))
        assert same_values(*sums)
        assert (ours.shape, ours.dtype) == ((-(-x.numel() // chunk),), torch.float32)
        far = theirs > 1e38
        assert torch.allclose(ours[~far], theirs[~far], rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_accumulated_may_be_of_any_type(dtype: torch.dtype) -> None:
    x, residual = torch.ones(10, dtype=dtype), torch.arange(10, dtype=torch.float32).to(dtype)
    assert accumulate(x, residual, 4).tolist() == [8 + 6.0, 8 + 22.0, 4 + 17.0]
    assert x.tolist() == [1.0 + i for i in range(10)]


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
]


@every_kernel
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_codec_is_the_same_with_all_kernels(name: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload written with one of them decodes to the same bits with the other; encoding differs rarely."""
    kernels, elements, different = fast(name), 0, 0
    for seed, numel in enumerate([0, 1, 63, 64, 65, 500, 3001]):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        decoded_by, payloads = [], []
        for chosen in (reference, kernels):
            for module in kernel_users:
                monkeypatch.setattr(module, "kernels_for", lambda kind, chosen=chosen: chosen)
            payloads.append(codec.encode(x, seed=5))
            decoded_by.append(codec.decode(payloads[0], numel, x.dtype))
        assert same_values(*decoded_by)
        both = [codec.decode(payload, numel, x.dtype) for payload in payloads]
        apart = ~torch.isclose(*both, rtol=1e-5, atol=0)
        elements, different = elements + numel, different + int(apart.sum())
    assert different <= 1e-4 * elements


def test_triton_interpreted() -> None:
    """The tests above for triton, in a process of its own: whether it interprets is settled at its import."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    # The interpreter computes with numpy, which warns where a sum becomes infinite, as it should here.
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", "cuda", "-W", "ignore::RuntimeWarning"]
    subprocess.run(command, check=True, env=environment, timeout=250)


def test_chance_is_uniform() -> None:
    """Of every seed, and for neighbours in element and in seed independent."""
    draws = torch.stack([reference.uniform(4096, 0, seed, torch.device("cpu")) for seed in range(64)]).double()
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / draws.numel() ** 0.5
    assert abs(draws.var() - 1 / 12) < 0.001
    for a, b in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1]), (draws[1:, :-1], draws[:-1, 1:])):
        assert abs(((a - 0.5) * (b - 0.5)).mean() * 12) < 5 / a.numel() ** 0.5
    assert reference.uniform(3, 5, 1, draws.device).tolist() == reference.uniform(8, 0, 1, draws.device)[5:].tolist()


def test_devices_without_kernels_get_the_reference() -> None:
    assert kernels_for("xpu") is kernels_named("reference")
    assert kernels_for("cpu") is kernels_named("cpu")


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_on_meta_tensors_the_shapes_are_the_same(codec: Codec) -> None:
    """Also by the reference, which runs anywhere."""
    x, nothing = torch.randn(100), torch.empty(100, device="meta")
    kinds = [(t.shape, t.dtype) for t in codec.encode_rest(x, x)]
    assert [(t.shape, t.dtype) for t in codec.encode_rest(nothing, nothing)] == kinds
    assert codec.decode(codec.encode(nothing), 100, x.dtype).shape == (100,)
    for kernels in (reference, kernels_for("meta")):
        assert kernels.chunk_norms(nothing, None, 16).shape == chunk_norms(x, None, 16).shape == (7,)


def test_without_its_compiler_the_reference_takes_over_and_says_so() -> None:
    code = """
import sys, warnings
sys.modules["numba"] = None
import torch
from gossamer.codecs import Quantize
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x = torch.randn(1000)
    for _ in range(2):
        assert (Quantize().decode(Quantize().encode(x), 1000, x.dtype) - x).abs().max() < 0.05
assert [str(w.message)[:26] for w in said] == ["codecs run in plain torch,"], said
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compilers_are_imported_at_the_first_use() -> None:
    code = "import sys, gossamer.codecs; assert not {'numba', 'triton', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encoding_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for poison in SPECIAL:
            Quantize().encode_rest(torch.full((600,), poison), None)
