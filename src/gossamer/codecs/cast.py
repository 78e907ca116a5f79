"""Cast: a narrower floating-point type on the wire."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.codecs.wire import Wire, check_wire, narrowed


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Round to ``wire`` when that is narrower than the tensor; ``"fp32"`` is full precision: the tensor's own dtype.

    Bytes: 2 per element for ``"fp16"`` and ``"bf16"``. fp16 keeps 11 significant bits but overflows above 65504;
    bf16 keeps 8 and the range of fp32.
    """

    wire: Wire = "fp32"

    def __post_init__(self) -> None:
        check_wire("wire", self.wire)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor of type ``dtype`` has on the wire; never a wider one."""
        return narrowed(dtype, self.wire)

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return tensor.to(self.wire_dtype(tensor.dtype), copy=True)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return payload.to(dtype)

    def error_bound(self, tensor: Tensor) -> Tensor:
        narrow = self.wire_dtype(tensor.dtype)
        if narrow == tensor.dtype:
            return torch.zeros_like(tensor)
        info = torch.finfo(narrow)
        return tensor.abs() * (info.eps / 2) + info.smallest_normal * info.eps
