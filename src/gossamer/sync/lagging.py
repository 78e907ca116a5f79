"""Lagging: how ranks that need not be at the same step come together again."""

import time
from collections.abc import Callable

import torch

from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.sync.weights import WeightSync

_GRACE = 0.02
"""Seconds after which a rank begins to answer: mostly, all others are about to come as well."""


def catch_up(runner: Runner, sync: WeightSync, again: Callable[[], None]) -> None:
    """Wait until every rank has come here and all have taken part in the same exchanges. Collective.

    Those that come first go on answering the others, who may still train and wait for their part: ``again()`` takes part
    in one more exchange of ``sync``.
    """
    world, begin = runner.world, time.monotonic()

    def answer() -> bool:
        if time.monotonic() - begin < _GRACE or not sync.can_answer:
            return False
        again()
        return True

    label = "the end of exchanges that may lag"
    runner.wait(runner.submit(lambda: maximum(torch.zeros(1), world), label, CONTROL), answer)
    mine = torch.tensor([sync.exchanges])
    most = runner.run(lambda: maximum(mine, world), "the number of exchanges").item()
    while sync.exchanges < most:
        again()
