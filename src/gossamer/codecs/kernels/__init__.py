"""Kernels: the loops of the codecs, once per kind of device, chosen by where the tensor lives.

``reference`` says what is computed, in plain torch, and runs anywhere; ``cpu`` (numba) and ``cuda`` (triton) do the same in
one pass over memory. Decoding gives the same bits in all of them; codes differ by at most one level, in at most one of
10,000 elements. A fast kernel is imported at its first use, and where its compiler is missing or fails the reference takes its
place, with a warning.
"""

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from gossamer.codecs.kernels.layout import Blocks, Grid


class Kernels(Protocol):
    """What a kernel module offers. Tensors are flat, contiguous and fp32 (payloads: uint8), all on one device; ``residual``,
    ``rest`` and ``out`` of ``accumulate`` and ``narrow`` may be bfloat16.

    ``payload``, ``rest`` and ``out`` are filled; a ``rest`` of None is not wanted. See ``reference`` for what each computes.
    """

    def quantize(
        self, x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None
    ) -> None: ...

    def dequantize(self, payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None: ...

    def sign(
        self, x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None
    ) -> None: ...

    def unsign(self, payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None: ...

    def chunk_norms(self, x: Tensor, residual: Tensor | None, chunk: int) -> Tensor: ...

    def accumulate(self, x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor: ...

    def narrow(self, values: Tensor, out: Tensor, seed: int) -> None: ...

    def largest(self, x: Tensor, chunk: int, count: int, last: int) -> Tensor: ...

    def modulo_pack(self, values: Tensor, steps: Tensor, bits: int, factors: Tensor, codes: Tensor, sums: Tensor) -> Tensor: ...

    def modulo_difference(
        self, codes: Tensor, sums: Tensor, own: Tensor, steps: Tensor, bits: int, factors: Tensor, share: float, out: Tensor,
        add: bool,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


COMPILERS = {"cpu": "numba", "cuda": "triton"}

_failed: set[str] = set()
"""Kinds of devices whose compiler is missing, or has failed."""


@cache
def kernels_named(name: str) -> Kernels:
    """The module ``reference``, ``cpu``, ``cuda`` or ``meta``. Raises ImportError where its compiler is missing."""
    return cast(Kernels, importlib.import_module(f"{__name__}.{name}"))


@cache
def kernels_for(device: torch.device | str) -> Kernels:
    """The fastest kernels that there are for tensors on such a device."""
    kind = torch.device(device).type
    if kind not in COMPILERS:
        return kernels_named("meta" if kind == "meta" else "reference")
    try:
        kernels = kernels_named(kind)
        if kind == "cuda":  # triton looks for a C compiler, and for what the GPU can do, when it launches its first kernel
            kernels.chunk_norms(torch.zeros(8, device=device), None, 8)
    except Exception as reason:  # compilers raise what they like
        compiler = COMPILERS[kind]
        warnings.warn(f"codecs run in plain torch, several times slower: {compiler} cannot be used ({reason})", stacklevel=2)
        _failed.add(kind)
        return kernels_named("reference")
    return kernels


def compiler_for(device_type: str) -> str:
    """What compiles the kernels for such a device: ``"torch"`` where nothing does. Imports nothing, so of a compiler that is
    installed it knows only after the first use whether it can be used."""
    compiler = COMPILERS.get(device_type, "torch")
    usable = device_type not in _failed and importlib.util.find_spec(compiler) is not None
    return compiler if usable else "torch"


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    """``float32[ceil(n/chunk)]``: the L1 norm of ``x + residual`` over each chunk of ``chunk`` elements.

    NaN or inf in a chunk shows in its norm. Any floating-point dtype; the sum is made in fp32.
    """
    return kernels_for(x.device).chunk_norms(single(x), None if residual is None else single(residual), chunk)


def kernels_of(values: Tensor) -> Kernels:
    """The fastest kernels that take a flat tensor as it is: the reference, if it is not contiguous fp32."""
    single_precision = values.dtype == torch.float32 and values.is_contiguous()
    return kernels_for(values.device) if single_precision else kernels_named("reference")


def single(tensor: Tensor) -> Tensor:
    """The tensor as contiguous fp32: itself, if it is that already."""
    return tensor.detach().to(torch.float32).contiguous()


def is_kept_so(residual: Tensor) -> bool:
    """Whether kernels take it as a residual, and write what remains there: contiguous, bfloat16 or fp32."""
    return residual.dtype in (torch.bfloat16, torch.float32) and residual.is_contiguous()


def as_kept(residual: Tensor) -> Tensor:
    """A residual as kernels take it; itself, if it is that already."""
    return residual.detach() if is_kept_so(residual) else single(residual)
