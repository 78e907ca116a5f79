"""Cast: a narrower floating-point type on the wire."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.errors import ConfigurationError
from gossamer.memory import portions

Wire = Literal["fp32", "fp16", "bf16"]

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
        narrow = _NARROW.get(self.wire, dtype)
        return narrow if narrow.itemsize < dtype.itemsize else dtype

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


def limited(values: Tensor, most: float) -> Tensor:
    """The values, none further from 0 than ``most``; what is not finite comes out as NaN."""
    return values.clamp(-most, most) + 0 * values


def narrow_into(out: Tensor, values: Tensor) -> None:
    """Round flat ``values`` into ``out``: what is too large for its type to the largest it has, what is not finite to NaN."""
    for part, place in portions(values, out):
        place.copy_(limited(part, torch.finfo(out.dtype).max))


def check_wire(name: str, wire: object) -> None:
    """Raise ConfigurationError unless ``wire`` is a precision that the field ``name`` may have."""
    check_choice(name, wire, Wire)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ConfigurationError unless ``value`` is a choice of this ``Literal``, type included: 8.0 is no number of bits."""
    allowed = get_args(choices)
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
        raise ConfigurationError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def wire_codec(wire: Wire) -> Cast:
    """The codec for an algorithm's ``wire`` field."""
    return Cast(wire=wire)
