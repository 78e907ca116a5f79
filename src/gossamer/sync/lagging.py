"""Lagging: how ranks that need not be at the same step come together again."""

import time
from collections.abc import Callable, Sequence

import torch

from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.sync.weights import WeightSync

_PAUSE = 0.002
"""Seconds between two looks."""

_GRACE = 0.02
"""Seconds after which this rank begins to answer: mostly, all others are about to come as well."""


def catch_up(runner: Runner, syncs: Sequence[WeightSync], again: Callable[[int], None]) -> None:
    """Wait until every rank has come here and all have taken part in the same exchanges. Collective.

    Those that come first go on answering the others, who may still train and wait for their part: ``again(index)`` takes
    part in one more exchange of ``syncs[index]``.
    """
    world = runner.world
    here = runner.submit(lambda: maximum(torch.zeros(1), world), "the end of exchanges that may lag", CONTROL)
    last = begin = time.monotonic()
    while not runner.arrived(here) and time.monotonic() - last < runner.timeout:
        time.sleep(_PAUSE)
        if time.monotonic() - begin < _GRACE:
            continue
        for index, sync in enumerate(syncs):
            if sync.can_answer:
                again(index)
                last = time.monotonic()
    runner.wait(here)
    mine = torch.tensor([sync.exchanges for sync in syncs])
    most = runner.run(lambda: maximum(mine, world), "the number of exchanges").tolist()
    for index, sync in enumerate(syncs):
        while sync.exchanges < most[index]:
            again(index)
