"""Mean: the mean over all workers, or samples, of what a bucket of weights holds, without rounding of workers that agree."""

import torch
from torch import Tensor

from gossamer.algorithms.blocks.shares import by_samples
from gossamer.buckets import Bucket
from gossamer.comm.ops import Context, Flow, all_reduce, maximum, permute
from gossamer.comm.topology import Topology, exchange_at
from gossamer.memory import portions, wide


def way_to_mean(bucket: Bucket, ctx: Context) -> Flow[Tensor]:
    """What is to be added to the weights in the bucket so that they become their mean over all workers."""
    weights = wide(bucket.flat)
    mean = yield from mean_of(bucket, weights, ctx)
    return mean.sub_(weights).to(bucket.flat.dtype)


def mean_of(bucket: Bucket, weights: Tensor, ctx: Context) -> Flow[Tensor]:
    """The mean over all workers of ``weights``, :func:`wide` of the bucket's: in 16 bits the rounding of a sum would be as
    large as what workers differ by.

    What may be the rounding of a sum is no difference: workers that agree stay where they are, to the bit. But they all do, or
    none: a difference that only some of them left out would be lost from the mean.
    """
    share = torch.div(weights, ctx.world, out=bucket.fresh() if weights is bucket.flat else None)
    mean = yield from all_reduce((yield from by_samples(share, ctx)))
    differs = yield from maximum(beyond_rounding(mean, weights, ctx.world), ctx.world)
    return torch.where(differs > 0, mean, weights, out=mean)


def way_to_peers(values: Tensor, topology: Topology | None, ctx: Context) -> Flow[Tensor]:
    """What is to be added to ``values`` so that they become their mean over this worker's peers of the step, or over all."""
    if topology is None:
        return (yield from all_reduce(values / ctx.world)) - values
    total, peers = torch.zeros_like(values), exchange_at(topology, ctx.step, ctx.world).permutations
    for permutation in peers:
        total += (yield from permute(values, permutation)) - values
    return total / (len(peers) + 1)


def beyond_rounding(mean: Tensor, weights: Tensor, world: int) -> Tensor:
    """``float32[1]``: 1 if any element of ``mean`` is further from its own weight than a sum of ``world`` equal ones may be
    rounded by; else 0."""
    rounding = world * torch.finfo(weights.dtype).eps
    within = [
        (there.sub(own).abs_() <= own.abs().mul_(rounding)).all()  # what is not finite is not
        for there, own in portions(mean, weights)
    ]
    return (~torch.stack(within).all()).float().reshape(1)
