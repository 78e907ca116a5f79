"""Plain: nested values as bytes and back, without pickle, for what one rank sends to another.

A message is a JSON text that describes the structure, and the raw bytes of the tensors in the order in which the text names
them. Reading it makes nothing but numbers, strings, containers and tensors, whatever a rank sends.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_HEADER = 8
"""Bytes of the length of the text, before it."""


def written(value: Any, what: str = "the value") -> Tensor:
    """``value`` as bytes (``uint8``, on the host): None, booleans, numbers, strings, dtypes, dense tensors, and dictionaries,
    lists and tuples of these.

    Raises:
        TypeError: there is anything else in it; the message says what, and where in ``what``.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_described(value, tensors, what)).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(_HEADER, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)])


def read(message: Tensor) -> Any:
    """What :func:`written` was given; its tensors on the host."""
    size = int.from_bytes(bytes(message[:_HEADER].tolist()), "little")
    described = json.loads(message[_HEADER : _HEADER + size].numpy().tobytes())
    return _read(described, _Tensors(message[_HEADER + size :]))


def _described(value: Any, tensors: list[Tensor], place: str) -> Any:
    """The structure as JSON has it: scalars as they are, all else as a list that begins with its kind."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise TypeError(f"{place} is a {type(value).__name__}, {value.layout}: only dense tensors can be sent")
        tensors.append(value)
        return ["tensor", str(value.dtype), list(value.shape)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, Mapping):
        pairs = [[_described(k, tensors, place), _described(v, tensors, f"{place}[{k!r}]")] for k, v in value.items()]
        return ["dict", *pairs]
    if isinstance(value, list | tuple):
        inside = [_described(each, tensors, f"{place}[{index}]") for index, each in enumerate(value)]
        return ["list" if isinstance(value, list) else "tuple", *inside]
    raise TypeError(f"{place} is a {type(value).__name__}: only numbers, strings, tensors and containers of them can be sent")


class _Tensors:
    """The tensors whose bytes follow each other in ``raw``, one after the other."""

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw

    def take(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        size = dtype.itemsize * shape.numel()
        mine, self._raw = self._raw[:size], self._raw[size:]
        return mine.clone().view(dtype).reshape(shape)  # a copy begins where a tensor of any dtype may begin


def _read(described: Any, tensors: _Tensors) -> Any:
    if not isinstance(described, list):
        return described
    kind, *inside = described
    if kind == "tensor":
        return tensors.take(_DTYPES[inside[0]], torch.Size(inside[1]))
    if kind == "dtype":
        return _DTYPES[inside[0]]
    if kind == "dict":
        return {_read(key, tensors): _read(value, tensors) for key, value in inside}
    made = [_read(each, tensors) for each in inside]
    return made if kind == "list" else tuple(made)
