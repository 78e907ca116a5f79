"""Wire: in how many bits a tensor travels or is kept, and how its values get there."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.memory import portions

Wire = Literal["fp32", "fp16", "bf16"]

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def narrowed(dtype: torch.dtype, wire: Wire) -> torch.dtype:
    """The dtype that a tensor of type ``dtype`` has on the wire; never a wider one."""
    narrow = _NARROW.get(wire, dtype)
    return narrow if narrow.itemsize < dtype.itemsize else dtype


def limited(values: Tensor, most: float) -> Tensor:
    """The values, none further from 0 than ``most``; what is not finite comes out as NaN."""
    return values.clamp(-most, most) + 0 * values


def narrow_into(out: Tensor, values: Tensor) -> None:
    """Round flat ``values`` into ``out``: what is too large for its type to the largest it has, what is not finite to NaN."""
    for part, place in portions(values, out):
        place.copy_(limited(part, torch.finfo(out.dtype).max))


def narrow(message: Tensor, values: Tensor) -> Tensor:
    """Round ``values`` to the type of ``message``, and return that. In fp16, whose range a running variance may leave, without
    inf: the difference of two such would be NaN."""
    if message.dtype == torch.float16 != values.dtype:
        narrow_into(message, values)
    else:
        message.copy_(values)
    return message


def check_wire(name: str, wire: object) -> None:
    """Raise ConfigurationError unless ``wire`` is a precision that the field ``name`` may have."""
    check_choice(name, wire, Wire)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ConfigurationError unless ``value`` is a choice of this ``Literal``, type included: 8.0 is no number of bits."""
    allowed = get_args(choices)
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
        raise ConfigurationError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")
