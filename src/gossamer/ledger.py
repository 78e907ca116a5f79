"""Ledger: tensors by key, written in transactions."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


class Ledger(Generic[K]):
    """Tensors by key. What is written becomes what is kept only at :meth:`commit`, and for good at :meth:`confirm`."""

    def __init__(self) -> None:
        self.kept: dict[K, Tensor] = {}
        self.draft: dict[K, Tensor | None] = {}
        """None: to be dropped."""
        self.before: dict[K, Tensor | None] = {}
        """What was kept at the last :meth:`confirm`, of what has changed since; None: nothing."""
        self.spare: dict[K, Tensor] = {}
        """What will not be kept again: memory for what is written next, on the host, where new memory is not free."""

    def get(self, key: K) -> Tensor | None:
        """The last value written, committed or not."""
        return self.draft.get(key, self.kept.get(key))

    def load(self, values: Mapping[K, Tensor | None]) -> None:
        """Keep exactly ``values``, leaving out what is None."""
        self.draft, self.before, self.spare = {}, {}, {}
        self.kept = {key: value for key, value in values.items() if value is not None}

    def keep_where(self, broken: Tensor, chosen: Callable[[K], bool] = lambda key: True) -> None:
        """Where ``broken`` (one boolean, on the tensors' device) holds, write again what is kept: zeros, if nothing fits. Of
        the ``chosen`` keys."""
        for key, draft in self.draft.items():
            if draft is None or not chosen(key):
                continue
            kept = self.kept.get(key)
            if kept is None or kept.shape != draft.shape:
                kept = torch.zeros_like(draft)
            draft.copy_(torch.where(broken.reshape(()), kept.to(draft.dtype), draft))

    def commit(self) -> None:
        """Keep what was written."""
        self.spare = {}
        self.take(self)
        self.draft.clear()

    def take(self, other: "Ledger[K]") -> None:
        """Keep what was written to another one."""
        for key, value in other.draft.items():
            old = self._keep(key, value)
            if key not in self.before:
                self.before[key] = old
            else:
                self._set_aside(key, old)

    def confirm(self) -> None:
        """From now on :meth:`undo` goes back to what is kept now."""
        for key, value in self.before.items():
            self._set_aside(key, value)
        self.before = {}

    def undo(self) -> None:
        """Keep what was kept at the last :meth:`confirm`."""
        for key, value in self.before.items():
            self._set_aside(key, self._keep(key, value))
        self.before = {}

    def items(self, confirmed: bool = False) -> list[tuple[K, Tensor]]:
        """What is kept; ``confirmed``: what :meth:`undo` would keep."""
        values: dict[K, Tensor | None] = {**self.kept, **(self.before if confirmed else {})}
        return [(key, value) for key, value in values.items() if value is not None]

    def _keep(self, key: K, value: Tensor | None) -> Tensor | None:
        """Keep one value, or nothing; returns what was kept before."""
        old = self.kept.get(key)
        if value is None:
            self.kept.pop(key, None)
        else:
            self.kept[key] = value
        return old

    def _set_aside(self, key: K, value: Tensor | None) -> None:
        if value is not None and value.device.type == "cpu":
            self.spare[key] = value

    @property
    def at_rest(self) -> bool:
        """Whether :meth:`commit` and :meth:`confirm` would change nothing."""
        return not (self.draft or self.before or self.spare)

    def rollback(self) -> None:
        """Forget what was written."""
        self.draft.clear()

    def later(self) -> "Ledger[K]":
        """One that keeps everything written here so far."""
        other: Ledger[K] = Ledger()
        other.kept = dict(self.kept)
        other.take(self)
        return other
