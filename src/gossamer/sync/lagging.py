"""Lagging: how ranks that need not be at the same step come together again."""

import time
from collections.abc import Callable

import torch

from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.sync.weights import WeightSync

_GRACE = 0.02
"""Seconds after which a rank begins to answer: mostly, all others are about to come as well."""


def patiently(answer: Callable[[], bool]) -> Callable[[], bool]:
    """``answer`` for a wait that begins now, once it has lasted. As others may train on for long, that is getting on."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin >= _GRACE and answer()


def catch_up(runner: Runner, sync: WeightSync, answer: Callable[[], bool], again: Callable[[], None]) -> None:
    """Wait until every rank has come here and all have taken part in the same exchanges. Collective.

    Those that come first go on answering the others, who may still train and wait for their part: ``again()`` takes part
    in one more exchange of ``sync``, ``answer()`` if it could begin at once, and says whether.
    """
    world, label = runner.world, "the end of exchanges that may lag"
    runner.wait(runner.submit(lambda: maximum(torch.zeros(1), world), label, CONTROL), patiently(answer))
    mine = torch.tensor([sync.exchanges])
    most = runner.run(lambda: maximum(mine, world), "the number of exchanges").item()
    while sync.exchanges < most:
        again()
