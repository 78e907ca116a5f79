"""Kernels: all of them do what the reference does, and are chosen by what there is."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.codecs import Codec, Quantize, Sign, chunk_norms
from gossamer.codecs import kernels as kernels_module
from gossamer.codecs.kernels import COMPILERS, Kernels, compiler_for, kernels_for, kernels_named, reference
from gossamer.codecs.residual import accumulate

from .parity import CODECS, LAWS, SPECIAL, a_codec_is_the_same


def fast(name: str) -> Kernels:
    """Kernels of this name that can run on CPU tensors: triton in its interpreter, in a process started for that."""
    pytest.importorskip(COMPILERS[name], reason=f"{COMPILERS[name]} is not installed")
    if name == "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton runs on CPU tensors only in its interpreter; test_triton_interpreted starts it")
    return kernels_named(name)


every_kernel = pytest.mark.parametrize("name", list(COMPILERS))


@every_kernel
@pytest.mark.parametrize(("law", "count"), LAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_law(name: str, law: Callable[[Kernels, int], None], count: int) -> None:
    law(fast(name), count if name == "cpu" else count // 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_accumulated_may_be_of_any_type(dtype: torch.dtype) -> None:
    residual = torch.arange(10, dtype=torch.float32).to(dtype)
    for kept in (None, torch.float16, torch.bfloat16, dtype):
        x = torch.ones(10, dtype=dtype)
        out = x if kept is None else torch.empty(10, dtype=kept)
        assert accumulate(x, residual, 4, 0, out).tolist() == [8 + 6.0, 8 + 22.0, 4 + 17.0]
        assert out.tolist() == [1.0 + i for i in range(10)]


@every_kernel
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_codec_is_the_same_with_all_kernels(name: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    a_codec_is_the_same(fast(name), codec, monkeypatch)


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


def test_what_is_rounded_at_random_is_right_on_average() -> None:
    """Of every element over the seeds, and of every tensor over the elements; and numbers of 16 bits stay what they are."""
    x = torch.cat([torch.linspace(-3, 3, 1000), torch.full((1000,), 1 + 2.0**-9), torch.tensor([0.0, -0.0, 1e-40, 3.3e38])])
    draws = torch.empty(512, x.numel(), dtype=torch.bfloat16)
    for seed, out in enumerate(draws):
        reference.narrow(x, out, seed)
    error = (draws.double() - x.double()) / x.double().abs().clamp(min=1e-37)
    assert error.abs().max() < 2.0**-7
    assert error.mean(0).abs().max() < 5 * 2.0**-8 / 512**0.5
    assert error[:, 1000:2000].mean(1).abs().max() < 2.0**-7 / 100  # if it were independent, an eighteenth
    again = torch.empty_like(draws[0])
    reference.narrow(draws[3].float(), again, 8)
    assert torch.equal(again, draws[3])
    reference.narrow(torch.tensor([3.4e38, -3.4e38, float("inf"), float("nan")]), again[:4], 0)
    assert again[:2].abs().tolist() == [torch.finfo(torch.bfloat16).max] * 2
    assert again[2:4].isnan().all()


def test_devices_without_kernels_get_the_reference() -> None:
    assert kernels_for("xpu") is kernels_named("reference")
    assert kernels_for("cpu") is kernels_named("cpu")


class Broken:
    """Kernels whose compiler finds no C compiler, which it looks for when it launches the first one."""

    def chunk_norms(self, x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
        raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(("kernels", "works"), [(Broken(), False), (reference, True)], ids=["broken", "working"])
def test_kernels_of_a_gpu_are_launched_once_before_they_are_chosen(
    kernels: Any, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))  # without a GPU
    monkeypatch.setattr(kernels_module, "kernels_named", lambda name: kernels if name == "cuda" else reference)
    monkeypatch.setattr(kernels_module, "_failed", set())
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: name)  # all are installed
    assert compiler_for("cuda") == "triton"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert kernels_for.__wrapped__("cuda") is (kernels if works else reference)
    assert ["triton cannot be used (Failed to find C compiler)" in str(w.message) for w in said] == ([] if works else [True])
    assert compiler_for("cuda") == ("triton" if works else "torch")


@pytest.mark.parametrize("codec", [Quantize(block=2**14), Quantize(bits=2, block=2**14), Sign(block=2**14)], ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 13, 2**14 - 1, 2**14 + 3])
def test_the_longest_blocks_may_be_longer_than_the_tensor(codec: Any, numel: int) -> None:
    """Whatever the kernels set aside for a block is as long as the tensor then."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    payload, rest = codec.encode_rest(x, None, seed=1)
    assert torch.equal(rest, x - codec.decode(payload, numel, x.dtype))
    assert (rest.abs() <= codec.error_bound(x)).all()


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
