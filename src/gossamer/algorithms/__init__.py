"""Algorithms: one relaxation, one file. A new file in this folder registers itself."""

import importlib
import pkgutil

from gossamer.algorithms.base import Algorithm, registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from gossamer.algorithms.all_reduce import AllReduce  # noqa: E402  (after the registry is complete)
from gossamer.algorithms.gossip import Gossip  # noqa: E402

__all__ = ["Algorithm", "AllReduce", "Gossip", "registry"]
