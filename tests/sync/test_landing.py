"""What exchanges bring is added to the weights, in one pass where that can be."""

import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import loopback
from gossamer.algorithms import Algorithm, Gossip, GossipGraD, in_parts
from gossamer.algorithms.base import Context
from gossamer.algorithms.difference import Difference
from gossamer.buckets import Bucket, make_layout, make_plan
from gossamer.codecs.wire import Wire
from gossamer.comm.loopback import LoopbackRunner, current_runner
from gossamer.comm.ops import Flow
from gossamer.comm.topology import Hypercube, Ring
from gossamer.simulate import Compute, Link
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


def test_a_weight_that_lies_otherwise_than_its_place_was_made_for_gets_what_is_its_own() -> None:
    """Channels-last when the bucket was laid out, and not any more."""
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
    theirs = torch.randn(bucket.flat.numel()).bfloat16()
    difference = Difference(bucket.flat, [theirs], 0.5)
    wanted = weight + bucket.split(difference.computed(torch.float32))[0]
    moved = weight.contiguous()
    landing.add([moved], difference, bucket)
    torch.testing.assert_close(moved, wanted, rtol=0, atol=0)
    for smaller in (torch.randn(3, 4), torch.randn(1)):
        with pytest.raises(RuntimeError):
            landing.add([smaller], difference, bucket)


def test_large_weights_are_left_to_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "MANY", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    weights, seen = [torch.zeros(9), torch.zeros(10)], []
    monkeypatch.setattr(landing, "_add_at_once", lambda loops, places, *_: seen.extend(place[2] for place in places))
    bucket = Bucket(0, make_layout({"small": weights[0], "large": weights[1]}, message=torch.float32))
    landing.add(weights, Difference(bucket.flat, [torch.ones(19)], 0.5), bucket)
    assert seen == [9]
    assert torch.equal(weights[1], torch.full((10,), 0.5))


def test_without_a_compiler_weights_are_averaged_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    landing.compiled_loops.cache_clear()
    monkeypatch.setitem(sys.modules, "gossamer.sync.loops", None)
    monkeypatch.delattr(gossamer.sync, "loops", raising=False)
    try:
        weight = torch.zeros(5)
        bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
        with pytest.warns(UserWarning, match="numba cannot be used"):
            landing.add([weight], Difference(bucket.flat, [torch.ones(5).bfloat16()], 0.5), bucket)
        assert torch.equal(weight, torch.full((5,), 0.5))
    finally:
        landing.compiled_loops.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_both_ways_to_exchange_weights_bring_the_same(dtype: torch.dtype, wire: Wire) -> None:
    algorithm = Gossip(wire=wire)

    def body(rank: int) -> list[Tensor]:
        runner, found = current_runner(), []
        assert runner is not None
        for message in (None, algorithm.message_dtype(dtype, torch.device("cpu"))):
            torch.manual_seed(rank)
            weight = torch.randn(5000).to(dtype)
            bucket = Bucket(0, make_layout({"weight": weight}, message=message))
            bucket.flat.copy_(weight)
            flow = partial(algorithm.flow(bucket), bucket, State(bucket.flat), Context(1, rank, (0, 1, 2, 3)))
            landing.add([weight], runner.run(flow, "one exchange"), bucket)
            found.append(weight)
        return found

    for rank, (exchanged, swapped) in enumerate(loopback(body, 4)):
        torch.manual_seed(rank)
        assert not torch.equal(exchanged, torch.randn(5000).to(dtype)), "something was exchanged"
        assert torch.equal(swapped, exchanged)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Gossip(), torch.bfloat16),
        (Gossip(wire="fp32"), torch.float32),
        (Gossip(topology=Hypercube()), torch.bfloat16),
        (GossipGraD(), torch.bfloat16),
        (in_parts(2, Gossip()), torch.bfloat16),
        (Gossip(wire="fp16"), None),  # what is beyond its range would be infinite
        (Gossip(topology=Ring()), None),  # two partners
        (gossamer.DecentralizedSGD(), None),
        (gossamer.GossipPGA(), None),  # an average over all needs the weights themselves
        (gossamer.after(3, Gossip()), None),
        (gossamer.AllReduce(), None),
    ],
    ids=repr,
)
def test_weights_lie_in_their_bucket_as_they_travel_where_that_is_enough(
    algorithm: Algorithm, message: torch.dtype | None
) -> None:
    host = torch.device("cpu")
    assert algorithm.message_dtype(torch.float32, host) == message
    assert algorithm.message_dtype(torch.bfloat16, host) is None
    assert algorithm.message_dtype(torch.float32, torch.device("cuda")) is None


def test_a_plan_for_other_messages_is_refused() -> None:
    tensors = {"weight": torch.empty(1000)}
    for plan, algorithm in ((Gossip(), gossamer.QuantizedGossip()), (Gossip(), Gossip(wire="fp32")), (Ring, Gossip())):
        made_for = Gossip(topology=Ring()) if plan is Ring else plan
        with pytest.raises(gossamer.ConfigurationError, match="was not made for"):
            gossamer.simulate.step_time(
                make_plan(tensors, made_for, at_once=True),
                algorithm,
                world=4,
                link=Link(bandwidth=1e9),
                compute=Compute(forward=1, backward=1),
            )


def test_an_exchange_that_somebody_has_written_is_the_one_that_runs() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Towards(Gossip, register=False):
        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            yield from ()
            return torch.full_like(bucket.flat, 7.0)

    assert Towards().message_dtype(torch.float32, torch.device("cpu")) is None
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = gossamer.replicate(model, optimizer, Towards())
    before = model.weight.item()
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    replica.close()
    assert model.weight.item() == pytest.approx(before + 14)


@pytest.mark.parametrize(("algorithm", "compiles"), [(in_parts(2, Gossip()), True), (Gossip(wire="fp16"), False)], ids=repr)
def test_loops_are_compiled_before_the_ranks_meet(
    algorithm: Algorithm, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none of them leaves ``replicate()`` before the others."""
    events: list[str] = []
    monkeypatch.setattr(landing, "compiled_loops", lambda: events.append("compiled"))
    opening = LoopbackRunner.agree_on_opening
    monkeypatch.setattr(LoopbackRunner, "agree_on_opening", lambda *a, **k: (events.append("met"), opening(*a, **k))[1])

    def body(rank: int) -> None:
        model = nn.Linear(3, 3)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm).close()

    loopback(body, 2)
    assert events.count("met") == 2
    assert events.count("compiled") == 2 * compiles
    assert not compiles or events[0] == "compiled"
    assert events[-1] == "met"
