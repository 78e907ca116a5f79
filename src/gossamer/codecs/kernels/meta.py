"""Kernels for ``meta`` tensors: results of the right shape, without values and without the time that values take.

A prediction is told which kernels are called, by the names under which they are measured: see :class:`Watched`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType

import torch
from torch import Tensor

from gossamer.codecs.kernels.layout import Blocks, Grid

Watcher = Callable[[str, int], AbstractContextManager[None]]
"""Called with the name of a kernel and its bytes of gradient, in fp32; what it returns is entered around the kernel."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


class Watched:
    """Inside, ``watcher`` is told which kernels are called."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        self._token = _watcher.set(self._watcher)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _watcher.reset(self._token)


_times: ContextVar[int] = ContextVar("times", default=1)


@contextmanager
def standing_for(calls: int) -> Iterator[None]:
    """Inside, each kernel that is called stands for so many calls: without values they are alike."""
    token = _times.set(_times.get() * calls)
    try:
        yield
    finally:
        _times.reset(token)


def _named(codec: str, kernel: str, x: Tensor) -> AbstractContextManager[None]:
    watcher = _watcher.get()
    return nullcontext() if watcher is None else watcher(f"{codec}, {kernel}", 4 * x.numel() * _times.get())


def _codec(grid: Grid) -> str:
    return f"{grid.bits} bits" + (", stochastic" if grid.stochastic else ", symmetric" if grid.symmetric else "")


def _encode(residual: Tensor | None) -> str:
    return "encode" if residual is None else "encode with feedback"


def _decode(add: bool) -> str:
    return "decode and add" if add else "decode"


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Nothing to write."""
    with _named(_codec(grid), _encode(residual), x):
        pass


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    """Nothing to write."""
    with _named(_codec(grid), _decode(add), out):
        pass


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Nothing to write."""
    with _named("sign", _encode(residual), x):
        pass


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    """Nothing to write."""
    with _named("sign", _decode(add), out):
        pass


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    """``float32[ceil(n/chunk)]``."""
    with _named("chunk norms", "of the sum with a residual", x):
        return torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device="meta")


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    """``float32[ceil(n/chunk)]``; nothing to add."""
    with _named("chunk norms", "adding a residual", x):
        return torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device="meta")


def narrow(values: Tensor, out: Tensor, seed: int) -> None:
    """Nothing to write."""
    with _named("memory copy", "copy", values):
        pass


def modulo_pack(values: Tensor, steps: Tensor, bits: int, factors: Tensor, codes: Tensor, sums: Tensor) -> Tensor:
    """``[blocks]``."""
    with _named(f"last {bits} bits of places", "encode", values):
        return torch.empty_like(steps)


def modulo_difference(
    codes: Tensor, sums: Tensor, own: Tensor, steps: Tensor, bits: int, factors: Tensor, share: float, out: Tensor, add: bool
) -> tuple[Tensor, Tensor]:
    """``bool[blocks]``, ``[blocks]``."""
    with _named(f"last {bits} bits of places", "decode", own):
        return torch.empty_like(steps, dtype=torch.bool), torch.empty_like(steps)


def largest(x: Tensor, chunk: int, count: int, last: int) -> Tensor:
    """``int16[m]``."""
    with _named("largest of each chunk", "encode", x):
        return torch.empty(x.numel() // chunk * count + last, dtype=torch.int16, device="meta")
