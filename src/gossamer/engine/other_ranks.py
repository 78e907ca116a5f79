"""Other ranks: what ranks of another number, or on other machines, take over of what the ranks before kept."""

import re
from collections.abc import Sequence

import torch

from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.algorithms.hierarchical import OUTER
from gossamer.comm.ops import Group
from gossamer.engine.bucket_states import Kept
from gossamer.engine.pending import PENDING
from gossamer.engine.samples import SAMPLES
from gossamer.memory import wide
from gossamer.state import DELTAS, MOMENTUM, OUTER_WEIGHTS, RESIDUAL

OF_MEANS = (MOMENTUM, OUTER_WEIGHTS, DELTAS)
"""The endings of names of what follows from means."""


def shared_out(entries: Sequence[Kept], scale: float, leaders: float = 1) -> Kept:
    """The sum of elementwise state, scaled so that its mean over the ranks stays what it was; that of leaders of nodes
    is scaled by ``leaders`` as well."""
    total: Kept = {}
    for entry in entries:
        for key, tensors in entry.items():
            here, factor = total.setdefault(key, {}), scale * leaders if OUTER in key else scale
            for name, tensor in tensors.items():
                share = factor * (wide(tensor) if key.endswith(RESIDUAL) else tensor)  # of many ranks, 16 bits would lose some
                here[name] = here[name] + share if name in here else share
    return total


def means(entries: Sequence[Kept]) -> Kept:
    """The mean of each momentum, of outer weights, and of deltas that these wait for, over the ranks that have them."""
    held: dict[str, list[Kept]] = {}
    for entry in entries:
        for key, tensors in entry.items():
            if key.endswith(OF_MEANS):
                held.setdefault(key, []).append({key: tensors})
    return {key: tensors for each in held.values() for key, tensors in shared_out(each, 1 / len(each)).items()}


def on_its_way(entry: Kept, prefix: str, same: bool, world: int) -> Kept:
    """What goes on with the weights of the rank whose ``entry`` it is: what has come for them, and the samples behind them.

    ``same``: the model has these weights. Samples are counted on all ranks or on none; where a model has other weights, 0.
    """
    found: Kept = {}
    for key, tensors in entry.items():
        name = key.removeprefix(prefix)
        if name.startswith(PENDING) and same:
            found[key] = tensors
        if name.startswith(SAMPLES) and world > 1:
            found[key] = tensors if same else {each: torch.zeros_like(number) for each, number in tensors.items()}
    return found


def grouped(launched: Sequence[Group] | None, algorithm: str, world: int) -> Sequence[Group]:
    """The ranks of each machine, as the algorithm of this ``repr`` sees them."""
    given = re.search(r"ranks_per_node=(\d+)", algorithm)
    if given:
        return consecutive(world, int(given[1]))
    return launched or consecutive(world, 1)
