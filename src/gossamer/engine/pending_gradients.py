"""Pending gradients: what ``p.grad`` is between backward and step while its bucket is under way (``overlap_forward``).

A loop may clip, scale or log gradients there. Whatever is asked of a pending gradient waits for its bucket, and is done with
the result of the exchange, in its place in the bucket, from which the update is taken later. So such a loop ends with the same
bits as without an overlap: it waits earlier. The pattern of ``AsyncCollectiveTensor``, of torch's functional collectives.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from gossamer.errors import CommunicationError

_logger = logging.getLogger("gossamer")


class PendingGradient(Tensor):
    """Stands for the gradient of ``parameter``; ``arrive`` waits for it and sets ``own``."""

    own: Tensor | None
    _arrive: Callable[[], None]

    @staticmethod
    def __new__(cls, parameter: Parameter, arrive: Callable[[], None]) -> "PendingGradient":
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        shape: Any = parameter.size()
        made: PendingGradient = Tensor._make_wrapper_subclass(
            cls, shape, strides=parameter.stride(), dtype=dtype, device=parameter.device
        )
        made.own, made._arrive = None, arrive
        return made

    def arrived(self) -> Tensor:
        """The gradient itself."""
        if self.own is None:
            self._arrive()
        if self.own is None:
            raise CommunicationError("a gradient is read whose exchange has failed")
        return self.own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python asks of it, ``.numpy()`` and ``.device`` too."""
        own_args, own_kwargs = tree_map_only(PendingGradient, PendingGradient.arrived, (args, kwargs or {}))
        return func(*own_args, **own_kwargs)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]
    """What torch itself does with it: a further backward pass adds to it."""


class PendingGradients:
    """Those of one step. ``arrive(parameter)`` waits for the bucket of a parameter, and calls :meth:`arrived`."""

    def __init__(self, rank: int, arrive: Callable[[Parameter], None]) -> None:
        self._rank, self._arrive = rank, arrive
        self._of: dict[int, PendingGradient] = {}
        self._told = False

    def forget(self) -> None:
        """Another step begins."""
        self._of = {}

    def stand_in(self, parameter: Parameter) -> Tensor:
        """What is to be ``p.grad`` until the step."""
        pending = self._of[id(parameter)] = PendingGradient(parameter, lambda: self._read(parameter))
        return pending

    def _read(self, parameter: Parameter) -> None:
        if self._rank == 0 and not self._told:
            _logger.warning(
                "gradients are read between backward() and step() (to be clipped or logged?): they are waited for there, so "
                "that little is left of their overlap with the forward pass"
            )
            self._told = True
        self._arrive(parameter)

    def arrived(self, gradients: Sequence[tuple[Parameter, Tensor]]) -> None:
        """These are there."""
        for parameter, gradient in gradients:
            if (pending := self._of.get(id(parameter))) is not None:
                pending.own = gradient

    def untouched(self, parameters: Iterable[Parameter]) -> bool:
        """Whether each ``p.grad`` is what backward has left there."""
        return all(parameter.grad is self._of.get(id(parameter)) for parameter in parameters)

    def replace(self, gradients: Mapping[int, Sequence[tuple[Parameter, Tensor]]]) -> None:
        """Make these ``p.grad``, where no other has been put there."""
        for parameter, gradient in (each for some in gradients.values() for each in some):
            if parameter.grad is self._of.get(id(parameter)):
                parameter.grad = gradient
