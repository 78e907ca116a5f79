"""Unchanged: evidence that nobody has written into weights between two moments.

Torch counts what is written into a parameter, but not what is written through ``.data``, as weights are often clamped or
swapped for an average. On the host their bits are added up too, weighted by their place, as integers, so that the sum does not
depend on the number of threads. On a device reading them would make the host wait: there only another place in memory is
noticed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.engine.sharding import local
from gossamer.memory import as_real

_WEIGHTS = torch.arange(1, 2 << 13, 2) * (0x9E3779B97F4A7C15 - 2**64)
"""Odd, so that a change of one row changes the sum, and spread over 64 bits (the golden ratio's multiplier)."""

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Evidence:
    """What parameters looked like when this was made."""

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        self._seen = {id(parameter): _look(parameter) for parameter in parameters}

    def changed(self, parameters: Iterable[Parameter]) -> Parameter | None:
        """The first of these that looks different now."""
        return next((p for p in parameters if id(p) in self._seen and self._seen[id(p)] != _look(p)), None)


def _look(parameter: Parameter) -> tuple[int, int]:
    tensor = as_real(local(parameter.detach()))
    return parameter._version, _bits(tensor) if tensor.device.type == "cpu" else tensor.data_ptr()


def _bits(tensor: Tensor) -> int:
    """A sum of a tensor's bits as integers, of eight bytes where they lie together, weighted by their place, so that elements
    that change places are seen. A row has one weight, and a tensor about 4,096 rows: what moves within one is not seen."""
    flat = tensor.reshape(-1)
    whole = 8 // tensor.element_size()
    if flat.storage_offset() % whole:
        flat = flat.clone()
    count = tensor.numel() // whole * whole
    words = flat[:count].view(torch.int64)
    length = max(1, len(words) >> 12)
    rows = words if length == 1 else words[: len(words) // length * length].view(-1, length).sum(1)
    found = int(torch.dot(rows, _WEIGHTS[: len(rows)]))
    if len(rows) * length < len(words):
        found += int(words[len(rows) * length :].sum())
    if count < tensor.numel():
        found += int(flat[count:].view(_OF_SIZE[tensor.element_size()]).sum())
    return found
