"""Unchanged: evidence that nobody has written into weights between two moments.

Torch counts what is written into a parameter, but not what is written through ``.data``, as weights are often clamped or
swapped for an average. On the host their bits are added up too, as integers, so that the sum does not depend on the number of
threads. On a device reading them would make the host wait: there only another place in memory is noticed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.engine.sharding import local
from gossamer.memory import as_real

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
    """The sum of a tensor's bits as integers, of eight bytes where they lie together: 1.4 ms for 40 MB, 48 ms of four each."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    whole = 8 // tensor.element_size()
    count = tensor.numel() // whole * whole
    if whole == 1 or flat.dim() != 1 or flat.storage_offset() % whole:
        return int(flat.view(_OF_SIZE[tensor.element_size()]).sum())
    rest = flat[count:].view(_OF_SIZE[tensor.element_size()])
    return int(flat[:count].view(torch.int64).sum()) + int(rest.sum())
