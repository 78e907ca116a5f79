"""Lagging: how ranks that are not at the same step come together again."""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.comm.calls import differing
from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner
from gossamer.engine.turns import following
from gossamer.engine.weights import WeightSync

_logger = logging.getLogger("gossamer")

_GRACE = 0.02
"""Seconds after which a rank begins to answer: mostly, all others are about to come as well."""


def after_grace(answer: Callable[[], bool]) -> Callable[[], bool]:
    """``answer`` for a wait that begins now, once it has lasted. As others may train on for long, that is getting on."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin >= _GRACE and answer()


def catch_up(runner: Runner, call: str, sync: WeightSync, answer: Callable[[], bool], again: Callable[[], None]) -> None:
    """Wait until every rank has made this ``call`` and all have taken part in the same exchanges. Collective.

    The first ranks go on answering the others, which may still train and wait for their part: ``again()`` takes part
    in one more exchange of ``sync``, ``answer()`` if that could begin immediately, and says whether.
    """
    runner.meet(call, after_grace(answer))
    most = int(_counts_of_all(runner, [sync.exchanges]).max())
    while sync.exchanges < most:
        again()


_MOST = 8
"""Exchanges that a rank which waits for the others takes part in: if they need more, they are not about to come."""


def even_out(
    runner: Runner,
    call: str,
    syncs: Sequence[WeightSync],
    taken: Sequence[int],
    turns: Sequence[int],
    again: Callable[[int], None],
) -> None:
    """Let ranks that took fewer steps take part in the exchanges that they have missed. Collective: all make this ``call``.

    Note [ranks that count differently]: an exchange of weights needs no step, so a batch that one rank left out costs the run
    nothing but that rank's update. Which rank is behind is known only when all are here; one that waits here while others
    wait for its part in an exchange takes part in one more, and else in none, so that runs without it are what they were.

    ``taken``: how many steps each optimizer has taken here; ``turns``: of which optimizers the last exchanges were, which tells
    whose is next; ``again(index)`` takes part in what follows a step of another rank.
    """

    answered = 0

    def answer() -> bool:
        nonlocal answered
        if not runner.awaited(call):
            return False
        if answered == _MOST:
            others = (rank for rank in range(runner.world) if rank != runner.rank)
            raise differing(runner.rank, call, dict.fromkeys(others, f"training, {_MOST} steps after this call"))
        answered += 1
        runner.let_ranks_part()
        again(_next(turns, range(len(syncs)), syncs))
        return True

    runner.meet(call, answer)
    steps = _counts_of_all(runner, [*taken, *(sync.steps for sync in syncs)])
    if bool((steps != steps[0]).any()):
        runner.let_ranks_part()
    if bool((steps[:, : len(taken)] != steps[0, : len(taken)]).any()) and runner.rank == 0:
        said = ", ".join(f"rank {rank} {' and '.join(map(str, row[: len(taken)]))}" for rank, row in enumerate(steps.tolist()))
        _logger.warning("ranks took different numbers of optimizer steps: %s; those behind take part in what they missed", said)
    most = steps[:, len(taken) :].max(dim=0).values.tolist()
    while behind := [index for index, sync in enumerate(syncs) if sync.steps < most[index]]:
        again(_next(turns, behind, syncs))


def most_of_all(runner: Runner, mine: int) -> int:
    """The largest of all ranks' numbers of steps. Collective."""
    return int(_counts_of_all(runner, [mine]).max())


def _next(turns: Sequence[int], among: Sequence[int], syncs: Sequence[WeightSync]) -> int:
    """The optimizer whose weights are exchanged next: as the order of the last exchanges has it, or that with fewest steps."""
    index = following(turns)
    return index if index in among else min(among, key=lambda each: syncs[each].steps)  # type: ignore[return-value]


def _counts_of_all(runner: Runner, mine: Sequence[int]) -> Tensor:
    """``mine`` of every rank: ``int64[world, len(mine)]``."""
    counts = torch.zeros(runner.world, len(mine), dtype=torch.int64)
    counts[runner.rank] = torch.tensor(mine)
    return runner.run(lambda: maximum(counts, runner.world), "the numbers of steps")
