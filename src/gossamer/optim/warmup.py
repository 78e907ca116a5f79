"""Warm-up: the learning rate rises linearly, then another schedule takes over."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError


def warmup(optimizer: Optimizer, steps: int, after: LRScheduler | None = None) -> LRScheduler:
    """A schedule whose t-th update (from 0) has the rate ``lr·(t + 1)/(steps + 1)``, and from ``steps`` on the full one.

    Call ``step()`` on it after every update. ``after`` (made on the same optimizer) takes over after ``steps`` updates
    and counts from its own beginning. Only torch's ``LinearLR`` and ``SequentialLR`` are at work.

    Raises:
        ConfigurationError: ``steps`` is no whole number, or less than 1.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.2; with the +1 no update has the rate 0.
    """
    if not is_whole(steps, 1):
        raise ConfigurationError(f"a warm-up takes at least one step; got {steps!r}")
    rise = LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    return rise if after is None else SequentialLR(optimizer, [rise, after], milestones=[steps])
