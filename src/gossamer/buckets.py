"""Bucket: the flat tensor in which the gradients (or weights) of several parameters travel as one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.bucket_plan import Layout, Segment
from gossamer.memory import is_alone, reused

__all__ = ["Bucket", "Memory", "Segment"]


class Memory:
    """Tensors of one bucket that are used again in every step.

    New memory is not free: the system has to find each page at its first touch, which on virtual machines can take
    ten times as long as what is computed on it. Devices have caching allocators and need none of this.
    """

    def __init__(self) -> None:
        self._spare: Tensor | None = None
        self._scratch: dict[str, Tensor] = {}

    def fresh(self, like: Tensor) -> Tensor:
        """An uninitialised tensor like ``like``."""
        spare, self._spare = self._spare, None
        return reused(spare, like)

    def scratch(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor of this name, made when it is first asked for."""
        kept = self._scratch.get(name)
        if kept is None or kept.dtype != dtype or kept.device != like.device or kept.shape != like.shape:
            kept = self._scratch[name] = torch.empty_like(like, dtype=dtype)
        return kept

    def recycle(self, tensor: Tensor) -> None:
        """Keep a tensor for :meth:`fresh`, if this is the only one that looks at its memory."""
        if is_alone(tensor):
            self._spare = tensor


class Bucket:
    """A flat tensor and the parameter-shaped views into it. This is what an algorithm is given.

    ``index`` is its place in the plan; ``segments`` give name, shape and offset of each parameter in ``flat``.
    """

    holds_shares = False
    """Whether the gradients in ``flat`` are already divided by the number of workers: see ``Algorithm.takes_shares``."""

    def __init__(self, index: int, layout: Layout) -> None:
        self.index = index
        self.layout = layout
        self.flat: Tensor = layout.allocate()
        self.views: list[Tensor] = layout.split(self.flat)
        self._memory = Memory()
        self._given = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Name, shape, strides and offset of each parameter."""
        return self.layout.segments

    def holding(self, flat: Tensor) -> "Bucket":
        """A bucket of the same layout around another flat tensor; itself, if that is its own."""
        if flat is self.flat:
            return self
        other = Bucket.__new__(Bucket)
        other.index, other.layout, other.flat, other.views = self.index, self.layout, flat, self.split(flat)
        other._memory, other._given = Memory(), False
        return other

    def fresh(self) -> Tensor:
        """An uninitialised tensor like ``flat``, for a result: one that has done its work before, if there is one."""
        return self._memory.fresh(self.flat)

    def scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor of this name, as long as ``flat`` and of type ``dtype``: the same memory in every step.

        For what an exchange sends and receives and nobody needs afterwards. Its values are whatever was left there.
        """
        return self._memory.scratch(name, self.flat, dtype)

    def recycle(self, result: Tensor) -> None:
        """Offer the memory of a result that has been used, unless somebody else still looks at it."""
        self._memory.recycle(result)

    def give(self) -> Tensor:
        """``flat``, to be written to and kept: an exchange that needs its input no more may turn it into what it remembers.

        Its result is another tensor then. Before the bucket is filled again, :meth:`renew` is called.
        """
        self._given = True
        return self.flat.detach()  # another tensor with the same memory: nobody takes that for free

    def renew(self) -> None:
        """Have memory of its own again, uninitialised, if the last exchange was given what there was."""
        if self._given:
            self._hold(self.fresh())

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parameter-shaped views of a tensor laid out like this bucket."""
        if flat is self.flat:
            return self.views
        return self.layout.split(flat)

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """A flat tensor, laid out like this bucket, of those of ``tensors`` that belong here; None if there are none."""
        here = [segment for segment in self.segments if segment.name in tensors]
        if not here:
            return None
        flat = torch.zeros_like(self.flat, dtype=tensors[here[0].name].dtype)
        for segment in here:
            segment.view(flat).copy_(tensors[segment.name])
        return flat

    def adopt(self, result: Tensor) -> bool:
        """Make ``result`` the bucket's content; whether ``flat`` and ``views`` are other tensors now.

        A result that fits is taken over as it is, without a copy.
        """
        if result is self.flat:
            return False
        if result.dtype != self.flat.dtype or result.device != self.flat.device or not result.is_contiguous():
            moves = self._given
            self.renew()
            self.flat.copy_(result)
            return moves
        before = self.flat
        self._hold(result)
        self.recycle(before)
        return True

    def _hold(self, flat: Tensor) -> None:
        self.flat, self.views, self._given = flat, self.layout.split(flat), False

    def __str__(self) -> str:
        names = self.layout.names
        return (
            f"bucket {self.index} ({names[0]} … {names[-1]}, {self.layout.nbytes} bytes)"
            if names
            else f"bucket {self.index} (empty)"
        )
