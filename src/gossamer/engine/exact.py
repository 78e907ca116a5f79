"""Exact weights: what an optimizer keeps in more bits than the model; exchanges of weights read and change those.

An average that is added to 16-bit weights is rounded, and towards the even neighbour where it lies half-way, which
it often does: small updates are lost again. An optimizer that keeps exact weights (``gossamer.optim.MasterWeights``, or
any other) offers ``exact_weight(parameter)`` and ``exact_weights_change()``, a context; and perhaps ``exact_weights_wait``:
whether it has loaded those of a model that may be loaded later.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import same_from_rank
from gossamer.engine.checks import held_by


def exact(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The tensor that holds the value of ``parameter`` in full: the optimizer's copy of it, or itself."""
    offered = getattr(optimizer, "exact_weight", None)
    result: Tensor = parameter if offered is None else offered(parameter)
    return result


def change(optimizer: Optimizer) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts inside which exact weights may be changed; afterwards the model follows them."""
    offered: Callable[[], AbstractContextManager[None]] = getattr(optimizer, "exact_weights_change", nullcontext)
    return offered


def changing(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Inside, exact weights may be changed; afterwards the model follows them."""
    return change(optimizer)()


def copies_from_rank(runner: Runner, optimizer: Optimizer, parameters: Iterable[Tensor], source: int) -> list[Tensor]:
    """Overwrite an optimizer's copies of ``parameters`` with those of rank ``source``, and return them. Collective.

    None, and none is touched, where any rank has loaded its own: they go on with the model that is loaded after them.
    """
    own = set(map(id, parameters))
    held = [parameter for parameter in held_by(optimizer) if id(parameter) in own]
    copies = [copy for parameter in held if (copy := exact(optimizer, parameter)) is not parameter]
    if not copies:
        return []
    waits = torch.tensor([bool(getattr(optimizer, "exact_weights_wait", False))], dtype=torch.uint8)
    if runner.run(lambda: maximum(waits, runner.world), "the question who has loaded copies of the weights").any():
        return []
    with changing(optimizer):
        same_from_rank(runner, copies, source)
    return copies
