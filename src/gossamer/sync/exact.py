"""Exact weights: what an optimizer keeps in more bits than the model; exchanges of weights read and change those.

An average that is added to 16-bit weights is rounded, and towards the even neighbour where it lies half-way, which
it often does: small updates are lost again. An optimizer that keeps exact weights (``gossamer.optim.MasterWeights``, or
any other) offers ``exact_weight(parameter)`` and ``exact_weights_change()``, a context.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer


def exact(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The tensor that holds the value of ``parameter`` in full: the optimizer's copy of it, or itself."""
    offered = getattr(optimizer, "exact_weight", None)
    result: Tensor = parameter if offered is None else offered(parameter)
    return result


def changing(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Inside, exact weights may be changed; afterwards the model follows them."""
    offered = getattr(optimizer, "exact_weights_change", None)
    result: AbstractContextManager[None] = nullcontext() if offered is None else offered()
    return result
