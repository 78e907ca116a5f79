"""The residual in fewer bits: what is sent and comes back is the same, and the bucket needs no second memory for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import ChunkSparse, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.hierarchical import inside, leaders_of, machine
from gossamer.bucket_plan import make_layout
from gossamer.buckets import Bucket
from gossamer.codecs import Quantize
from gossamer.codecs.residual import keep
from gossamer.comm.connect import connect
from gossamer.state import State

LENGTH = 5000


def steps(algorithm: Algorithm, world: int, dtype: torch.dtype, count: int) -> list[list[tuple[Tensor, Tensor, bool]]]:
    """For every rank and step the result, what is unsent, and whether the result lies where the gradient was."""

    def body(rank: int) -> list[tuple[Tensor, Tensor, bool]]:
        runner, found = connect(), []
        bucket = Bucket(0, make_layout({"a": torch.empty(50, 100, dtype=dtype)}))
        state = State(bucket.flat)
        for step in range(count):
            bucket.renew()
            source = torch.Generator().manual_seed(10 * step + rank)
            bucket.flat.copy_(torch.randn(LENGTH, generator=source))
            place = bucket.flat.data_ptr()
            ctx = Context(step, rank, tuple(range(world)), None)
            result: Tensor = runner.run(lambda ctx=ctx: algorithm.exchange(bucket, state, ctx), "an exchange")
            found.append((result.clone(), state["residual"].clone(), result.data_ptr() == place))
            bucket.adopt(result)
            state.commit()
        return found

    return loopback(body, world)


WAYS = [
    ScatterReduce(gather_below=0),
    ScatterReduce(),
    ScatterReduce(gather_below=0, server_feedback=False),
    ChunkSparse(chunk=50, density=0.3),
    ChunkSparse(chunk=50, density=0.3, codec=Quantize(bits=4)),
    PowerSGD(),
]
"""Each keeps 16 bits by default."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("algorithm", WAYS, ids=repr)
def test_what_is_kept_in_fewer_bits_changes_nothing_of_the_step(algorithm: Any, world: int, dtype: torch.dtype) -> None:
    wide, narrow = (steps(replace(algorithm, residual=residual), world, dtype, 1) for residual in ("fp32", "bf16"))
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(one[0][0], other[0][0])
        assert other[0][1].dtype == torch.bfloat16
        full, kept = one[0][1].double(), other[0][1].double()
        assert ((full - kept).abs() <= 2.0**-7 * full.abs()).all()
        if full.count_nonzero() > LENGTH / 2:
            assert abs((full - kept).mean()) < 2.0**-10 * full.abs().mean()


# Not where something is forgotten, which has no place of its own.
IN_PLACE = [way for way in WAYS if getattr(way, "server_feedback", True)]


@pytest.mark.parametrize("algorithm", IN_PLACE, ids=repr)
def test_the_mean_is_written_where_the_gradient_was(algorithm: Any) -> None:
    for rank in steps(algorithm, 3, torch.float32, 4):
        assert all(in_place for _, _, in_place in rank)
    for rank in steps(replace(algorithm, residual="fp32"), 3, torch.float32, 4):
        assert not any(in_place for _, _, in_place in rank)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_what_stays_unsent_stays_finite(kept: torch.dtype) -> None:
    """Also where it has fewer bits, and the parameter's memory is in another order."""
    layout = make_layout({"a": torch.empty(3), "b": torch.empty(2, 3).t()})
    state, place = State(torch.zeros(9)), layout.segments[1]
    state["residual"] = torch.full((9,), 49152.0, dtype=kept)
    mean = torch.tensor([[32768.0, 0.0], [0.0, 0.0], [-16384.0, 0.0]])
    assert ScatterReduce().put_back(mean, place, state, Context(0, 0, (0, 1), None))
    unsent = place.view(state["residual"])
    assert unsent[:, 0].tolist() == [min(81920.0, torch.finfo(kept).max), 49152.0, 32768.0]
    assert unsent[:, 1].tolist() == state["residual"][:3].tolist() == [49152.0] * 3


def test_what_is_too_large_for_fewer_bits_is_kept_as_the_largest() -> None:
    """One worker alone must not come to inf."""
    for kept in (torch.float16, torch.bfloat16):
        for rest in (torch.float32, torch.float64):
            out, largest = torch.empty(5, dtype=kept), torch.finfo(kept).max
            keep(torch.tensor([1.0, 3.4e38, -3.4e38, float("inf"), float("nan")], dtype=rest), out, 0)
            assert out[:3].tolist() == [1.0, largest, -largest]
            assert out[3:].isnan().all()
            if rest == torch.float64:
                keep(torch.tensor([1e300], dtype=rest), out[:1], 0)
                assert out[0] == largest


def test_no_two_workers_round_alike() -> None:
    """Not even values that are the same among the workers of their machine, nor one of them as a leader as it did there:
    noise that is one's own averages out."""
    machines = ((0, 1), (2, 3))
    whole = [Context(3, rank, (0, 1, 2, 3), machines) for rank in range(4)]
    seeds = [inside(ctx, machine(ctx, machines)).seed(5) for ctx in whole]
    leaders = [inside(whole[rank], leaders_of(machines)).seed(5) for rank in leaders_of(machines)]
    assert len({*seeds, *leaders}) == 6
