"""Shares: with how much of a mean over workers each counts: by its samples, and without outliers."""

import logging

import torch
from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.checks import is_number
from gossamer.comm.ops import Context, Flow, all_gather
from gossamer.errors import ConfigurationError
from gossamer.state import State

_logger = logging.getLogger("gossamer")

LEFT_OUT = "left out"
"""The extra of a bucket: how many of this worker's deltas were left out of an average."""

LEAST_SPREAD = 0.1
"""The spread of norms that is taken for usual, relative to their median, where they are closer: equal workers are in line."""


BROKEN = "its weights are no longer finite, and stay so: load those of another rank into its model, or resume from a checkpoint"
"""What is said of a worker that cannot come back by itself: what is added to NaN is NaN."""


def by_samples(values: Tensor, ctx: Context) -> Flow[Tensor]:
    """``values``, given away, such that their plain mean over the workers is the mean by samples. One small message to each."""
    if ctx.samples is None:
        return values
    counts = yield from all_gather(torch.tensor([ctx.samples], dtype=torch.float64, device=values.device))
    return values.mul_(factor(counts.flatten(), ctx.rank))


def in_line(delta: Tensor, bucket: Bucket, state: State, ctx: Context, outlier: float | None) -> Flow[Tensor]:
    """The same for outer deltas; that of a worker whose norm is more than ``outlier`` deviations above the median of all
    becomes zero, and the mean is that of the others. One that is not finite is out of line, too."""
    if outlier is None:
        return (yield from by_samples(delta, ctx))
    count = delta.new_full((), 1.0 if ctx.samples is None else ctx.samples, dtype=torch.float64)
    counts, norms = (yield from all_gather(torch.stack([count, torch.linalg.vector_norm(delta).double()]))).unbind(1)
    out = out_of_line(norms, counts, outlier)
    state.set_extra(LEFT_OUT, _so_far(state, out) + out[ctx.rank])
    if ctx.rank == 0 and out.device.type != "meta" and out.any():
        _name(out, norms, counts, bucket, ctx)
    delta, counts = torch.where(out[ctx.rank], torch.zeros_like(delta), delta), torch.where(out, 0.0, counts)
    counts = torch.where(counts.sum() > 0, counts, (~out).to(counts))  # the only ones with samples may be left out
    return delta.mul_(factor(counts, ctx.rank))


def out_of_line(norms: Tensor, counts: Tensor, limit: float) -> Tensor:
    """``bool[p]``: whose norm is not finite, or above the median by more than ``limit`` standard deviations, estimated by the
    median of absolute deviations (the modified z-score): a mean and its deviation would follow the outlier, so that among
    four workers no z-score is above 1.5. Workers that count nothing, of ``counts`` 0, have learned nothing, and are not asked;
    of two that are left nobody knows which one is out of line.

    Source: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers.
    """
    there, median = _asked(norms, counts)
    spread = torch.maximum(1.4826 * (there - median).abs().nanquantile(0.5), LEAST_SPREAD * median)
    judged = (there.isfinite().sum() > 2) & (median > 0)  # where most have learned nothing, one that has is not out of line
    return ~norms.isfinite() | ((there - median > limit * spread) & judged)


def _asked(norms: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the workers that count, NaN for the others, and their median: of an even number the mean of the two."""
    there = torch.where(norms.isfinite() & (counts > 0), norms, torch.nan)
    return there, there.nanquantile(0.5)


def check_outlier(outlier: object) -> None:
    """Raise ConfigurationError unless deltas can be left out from that z-score on."""
    if outlier is not None and not (is_number(outlier) and outlier > 0):
        raise ConfigurationError(
            "outlier must be the z-score above which a worker's outer delta is left out, such as 5.0, or None for never; got "
            f"{outlier!r}"
        )


def refuse_two(outlier: float | None, world: int) -> None:
    """Raise ConfigurationError where no worker can be out of line."""
    if outlier is not None and world == 2:
        raise ConfigurationError(f"outlier={outlier} takes three workers: of two, nobody knows which one is out of line")


def factor(counts: Tensor, rank: int | slice) -> Tensor:
    """The number of this worker, or of these, over the mean of all; 1 where no worker has any."""
    total = counts.sum()
    return torch.where(total > 0, counts[rank] * len(counts) / total, torch.ones_like(total))


def _so_far(state: State, like: Tensor) -> Tensor:
    had = state.extra(LEFT_OUT)
    return torch.zeros((), dtype=torch.int64, device=like.device) if had is None else had.to(like.device)


def _name(out: Tensor, norms: Tensor, counts: Tensor, bucket: Bucket, ctx: Context) -> None:
    for index in out.nonzero().flatten().tolist():
        _logger.warning(
            "the outer delta of rank %d is left out of the average of %s … after period %d: its norm is %.3g, the median of "
            "all ranks is %.3g%s",
            ctx.members[index],
            bucket.layout.names[0],
            ctx.step,
            float(norms[index]),
            float(_asked(norms, counts)[1]),
            "" if norms[index].isfinite() else f"; {BROKEN}",
        )
