"""Blockwise: what codecs share that write a header and the codes of every block by a kernel of their own."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.codecs.kernels import as_kept, is_kept_so, single
from gossamer.codecs.kernels.layout import Blocks
from gossamer.codecs.rounding import finite_or


@dataclass(frozen=True, kw_only=True)
class Blockwise(Codec):
    """Base of :class:`~gossamer.codecs.Quantize` and :class:`~gossamer.codecs.Sign`. Kernels work in fp32."""

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """The place of headers and codes in a payload."""

    @abstractmethod
    def write(self, x: Tensor, residual: Tensor | None, seed: int, payload: Tensor, rest: Tensor | None) -> None:
        """Encode fp32 ``x + residual`` into ``payload``; what it does not carry into ``rest``. These may be bfloat16."""

    @abstractmethod
    def read(self, payload: Tensor, values: Tensor, add: bool) -> None:
        """Decode into fp32 ``values``, or add to them."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        payload = self.blocks.empty(tensor)
        self.write(single(tensor), None, seed, payload, None)
        return payload

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.read(payload, values, False)
        return values.to(dtype)

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        if tensor.dtype == torch.float64:
            return super().encode_rest(tensor, residual, seed)
        x = single(tensor)
        payload, rest = self.blocks.empty(x), torch.empty_like(x)
        self.write(x, None if residual is None else as_kept(residual), seed, payload, rest)
        return payload, rest if rest.dtype == tensor.dtype else finite_or(rest.to(tensor.dtype), residual)

    def encode_keeping(self, tensor: Tensor, residual: Tensor | None, seed: int, rest: Tensor) -> Tensor:
        if not (_as_kernels_take(tensor) and is_kept_so(rest)):
            return super().encode_keeping(tensor, residual, seed, rest)
        payload = self.blocks.empty(tensor)
        self.write(tensor.detach(), None if residual is None else as_kept(residual), seed, payload, rest)
        return payload

    def decode_into(self, payload: Tensor, out: Tensor) -> None:
        if _as_kernels_take(out):
            self.read(payload, out, False)
        else:
            super().decode_into(payload, out)

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        if _as_kernels_take(total):
            self.read(payload, total, True)
        else:
            super().add_decoded(payload, total)


def _as_kernels_take(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()
