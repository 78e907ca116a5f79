"""State: what an algorithm remembers about a bucket, written in transactions."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class State:
    """Named flat tensors, each with one value per element of a bucket (a residual, a replica, a momentum).

    Reading an unknown name gives zeros. Writing keeps the old tensor until :meth:`commit`, so that an exchange which
    is aborted half-way loses nothing; write a new tensor, do not modify the one that was read.
    """

    def __init__(self, like: Tensor) -> None:
        # Not the tensor itself: a bucket gives its first one away, and it would be kept for nothing.
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._kept: dict[str, Tensor] = {}
        self._draft: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        value = self._draft.get(name, self._kept.get(name))
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device) if value is None else value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._draft[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._draft or name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def items(self) -> list[tuple[str, Tensor]]:
        """What is kept: names and tensors as of the last commit, whatever was written since."""
        return list(self._kept.items())

    def drafts(self) -> list[Tensor]:
        """What was written since the last commit."""
        return list(self._draft.values())

    def load(self, values: Mapping[str, Tensor | None]) -> None:
        """Keep exactly ``values``, leaving out what is None."""
        self._draft.clear()
        self._kept = {name: value for name, value in values.items() if value is not None}

    def commit(self) -> None:
        """Make everything written since the last commit the state to keep."""
        self._kept.update(self._draft)
        self._draft.clear()

    def rollback(self) -> None:
        """Forget everything written since the last commit."""
        self._draft.clear()
