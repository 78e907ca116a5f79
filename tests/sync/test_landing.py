"""What exchanges bring is added to the weights, in one pass where that can be."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import loopback
from gossamer.algorithms import Algorithm, Gossip, GossipPGA, in_parts
from gossamer.algorithms.base import Context
from gossamer.algorithms.difference import Difference
from gossamer.buckets import Bucket, make_layout
from gossamer.comm.loopback import current_runner
from gossamer.comm.ops import Flow
from gossamer.comm.topology import Complete, Ring
from gossamer.state import State
from gossamer.sync import landing


def awkward(dtype: torch.dtype) -> list[Tensor]:
    """Weights of odd sizes, channels-last, with gaps, without elements; and a piece of a larger one."""
    gapped = torch.randn(4, 6, dtype=dtype)[:, ::2]
    image = torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    return [torch.randn(7, 5, dtype=dtype), gapped, image, torch.randn(0, 3, dtype=dtype), torch.randn(90, dtype=dtype)[13:80]]


@pytest.mark.parametrize("partners", [0, 1, 3])
@pytest.mark.parametrize("message", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_difference_is_added_as_if_it_were_computed_first(dtype: torch.dtype, message: torch.dtype, partners: int) -> None:
    torch.manual_seed(0)
    weights = awkward(dtype)
    bucket = Bucket(0, make_layout({str(i): weight for i, weight in enumerate(weights)}, message=message))
    assert bucket.flat.dtype == message
    bucket.flat.copy_(torch.randn(bucket.flat.numel()))
    theirs = [torch.randn(bucket.flat.numel()).to(message) for _ in range(partners)]
    bucket.flat[3], bucket.flat[5] = float("inf"), float("nan")
    difference = Difference(bucket.flat, theirs, 1 / (partners + 1))
    wanted = [weight + part for weight, part in zip(weights, bucket.split(difference.computed(dtype)), strict=True)]
    landing.add(weights, difference, bucket)
    for weight, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight, want, rtol=0, atol=0, equal_nan=True)
    if partners:
        assert weights[0].isinf().sum() + weights[0].isnan().sum() == 2, "both are seen"


def test_autograd_notices_that_weights_have_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
    loss = (weight**2).sum()
    with torch.no_grad():
        landing.add([weight], Difference(bucket.flat, [torch.ones(3, dtype=torch.bfloat16)], 0.5), bucket)
    assert torch.equal(weight, torch.full((3,), 1.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("topology", [None, Ring(), Complete()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_to_exchange_weights_bring_the_same(dtype: torch.dtype, topology: Ring | Complete | None) -> None:
    algorithm = Gossip() if topology is None else Gossip(topology=topology)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        runner, found = current_runner(), []
        assert runner is not None
        for message in (None, algorithm.message_dtype(dtype)):
            torch.manual_seed(rank)
            weight = torch.randn(5000).to(dtype)
            bucket = Bucket(0, make_layout({"weight": weight}, message=message))
            bucket.flat.copy_(weight)
            flow = algorithm.flow(bucket)
            delta = runner.run(
                lambda flow=flow, bucket=bucket: flow(bucket, State(bucket.flat), Context(1, rank, (0, 1, 2, 3))), ""
            )
            landing.add([weight], delta, bucket)
            found.append(weight)
        return found[0], found[1]

    for exchanged, swapped in loopback(body, 4):
        assert not torch.equal(exchanged, torch.zeros_like(exchanged))
        torch.testing.assert_close(swapped, exchanged, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Gossip(), torch.bfloat16),
        (Gossip(wire="fp32"), torch.float32),
        (in_parts(2, Gossip()), torch.bfloat16),
        (Gossip(wire="fp16"), None),  # what is beyond its range would be infinite
        (GossipPGA(), None),  # an average over all needs the weights themselves
        (gossamer.after(3, Gossip()), None),
        (gossamer.AllReduce(), None),
    ],
    ids=repr,
)
def test_weights_lie_in_their_bucket_as_they_travel_where_that_is_enough(
    algorithm: Algorithm, message: torch.dtype | None
) -> None:
    assert algorithm.message_dtype(torch.float32) == message
    assert algorithm.message_dtype(torch.bfloat16) != torch.float32, "never wider"


def test_an_exchange_that_somebody_has_written_is_the_one_that_runs() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Towards(Gossip, register=False):
        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            yield from ()
            return torch.full_like(bucket.flat, 7.0)

    assert Towards().message_dtype(torch.float32) is None
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = gossamer.replicate(model, optimizer, Towards())
    before = model.weight.item()
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    replica.close()
    assert model.weight.item() == pytest.approx(before + 14)
