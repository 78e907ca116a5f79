"""Owners: several optimizers of one replica may take turns (a generator's and a discriminator's).

A pass then brings gradients that one of them will not use. What an algorithm loses of those, or keeps of them, must not
reach the others': whatever is not averaged exactly travels in buckets of one optimizer's parameters.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.algorithms.base import Algorithm

_MARK = " of optimizer "


class ByOwner:
    """The routing of an algorithm, with the number of the optimizer in the labels of what is not exact."""

    def __init__(self, algorithm: Algorithm, owners: Mapping[str, int]) -> None:
        """``owners``: the optimizer of each parameter, by name."""
        self._algorithm, self._owners = algorithm, owners

    def route(self, name: str, tensor: Tensor) -> str:
        """The algorithm's label, and whose parameter it is."""
        label = self._algorithm.route(name, tensor)
        if name not in self._owners or self._algorithm.of(label).exact:
            return label
        return f"{label}{_MARK}{self._owners[name]}"

    def of(self, label: str) -> Any:
        """Who handles it: the same for all owners."""
        return self._algorithm.of(label.rpartition(_MARK)[0] if _MARK in label else label)
