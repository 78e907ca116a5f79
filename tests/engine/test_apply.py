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
from gossamer.algorithms.blocks.difference import Difference, computed
from gossamer.bucket_plan import make_layout
from gossamer.buckets import Bucket
from gossamer.codecs.wire import Wire
from gossamer.comm.loopback import LoopbackRunner, current_runner
from gossamer.comm.ops import Flow
from gossamer.comm.topology import Hypercube, Ring, Topology
from gossamer.engine import apply as applying
from gossamer.engine.apply import apply
from gossamer.state import State


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
    wanted = [weight + part for weight, part in zip(weights, bucket.split(computed(difference, dtype)), strict=True)]
    apply(weights, difference, bucket)
    for weight, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight, want, rtol=0, atol=0, equal_nan=True)
    if partners:
        assert weights[0].isinf().sum() + weights[0].isnan().sum() == 2, "both are seen"


def test_autograd_notices_that_weights_have_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
    loss = (weight**2).sum()
    with torch.no_grad():
        apply([weight], Difference(bucket.flat, [torch.ones(3, dtype=torch.bfloat16)], 0.5), bucket)
    assert torch.equal(weight, torch.full((3,), 1.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_lies_otherwise_than_its_place_was_made_for_gets_what_is_its_own() -> None:
    """Channels-last when the bucket was laid out, and not any more."""
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
    theirs = torch.randn(bucket.flat.numel()).bfloat16()
    difference = Difference(bucket.flat, [theirs], 0.5)
    wanted = weight + bucket.split(computed(difference, torch.float32))[0]
    moved = weight.contiguous()
    apply([moved], difference, bucket)
    torch.testing.assert_close(moved, wanted, rtol=0, atol=0)
    for smaller in (torch.randn(3, 4), torch.randn(1)):
        with pytest.raises(RuntimeError):
            apply([smaller], difference, bucket)


def test_large_buckets_are_left_to_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "MANY", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    loops = applying.compiled_loops()
    for size, compiled in ((19, 1), (20, 0)):
        calls: list[int] = []
        monkeypatch.setattr(applying, "compiled_loops", lambda calls=calls: (calls.append(1), loops)[1])
        weight = torch.zeros(size)
        bucket = Bucket(0, make_layout({"weight": weight}))
        apply([weight], Difference(bucket.flat, [torch.ones(size)], 0.5), bucket)
        assert len(calls) == compiled
        assert torch.equal(weight, torch.full((size,), 0.5))


def test_without_a_compiler_weights_are_averaged_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    applying.compiled_loops.cache_clear()
    monkeypatch.setitem(sys.modules, "gossamer.engine.loops", None)
    monkeypatch.delattr(gossamer.engine, "loops", raising=False)
    try:
        weight = torch.zeros(5)
        bucket = Bucket(0, make_layout({"weight": weight}, message=torch.bfloat16))
        with pytest.warns(UserWarning, match="numba cannot be used"):
            apply([weight], Difference(bucket.flat, [torch.ones(5).bfloat16()], 0.5), bucket)
        assert torch.equal(weight, torch.full((5,), 0.5))
    finally:
        applying.compiled_loops.cache_clear()


@pytest.mark.parametrize("topology", [Hypercube(), Ring()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp32"])
def test_a_bucket_of_weights_brings_what_a_bucket_packed_as_message_brings(
    dtype: torch.dtype, wire: Wire, topology: Topology
) -> None:
    algorithm = Gossip(wire=wire, topology=topology)

    def made(rank: int) -> Tensor:
        torch.manual_seed(rank)
        return (torch.randn(5000) * 30_000).to(dtype)  # now and then beyond the range of fp16

    def body(rank: int) -> list[Tensor]:
        runner, found = current_runner(), []
        assert runner is not None
        for message in (dtype, algorithm.message_dtype(dtype)):
            weight = made(rank)
            bucket = Bucket(0, make_layout({"weight": weight}, message=message))
            applying.pack(bucket, [weight])
            flow = partial(algorithm.exchange, bucket, State(bucket.flat), Context(1, rank, (0, 1, 2, 3)))
            apply([weight], runner.run(flow, "one exchange"), bucket)
            found.append(weight)
        return found

    for rank, (exchanged, packed) in enumerate(loopback(body, 4)):
        assert not torch.equal(exchanged, made(rank)), "something was exchanged"
        assert exchanged.isfinite().all()
        assert torch.equal(packed, exchanged)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Gossip(), torch.bfloat16),
        (Gossip(wire="fp32"), torch.float32),
        (Gossip(topology=Hypercube()), torch.bfloat16),
        (GossipGraD(), torch.bfloat16),
        (in_parts(2, Gossip()), torch.bfloat16),
        (Gossip(wire="fp16"), torch.float16),
        (Gossip(topology=Ring()), torch.bfloat16),
        (gossamer.DecentralizedSGD(), torch.float32),
        (gossamer.GossipPGA(), torch.float32),  # an average over all needs the weights themselves
        (gossamer.Hierarchical(Gossip(), ranks_per_node=2), torch.bfloat16),
        (gossamer.after(3, Gossip(), before=gossamer.DecentralizedSGD()), torch.float32),
        (gossamer.after(3, Gossip()).part("weights"), torch.bfloat16),
        (gossamer.AllReduce(), torch.float32),
    ],
    ids=repr,
)
def test_buckets_are_packed_in_the_type_of_the_message(algorithm: Algorithm, message: torch.dtype) -> None:
    assert algorithm.message_dtype(torch.float32) == message
    assert algorithm.message_dtype(torch.bfloat16) == torch.bfloat16


def test_an_exchange_that_somebody_has_written_is_the_one_that_runs() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Towards(Gossip, register=False):
        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            yield from ()
            return torch.full_like(bucket.flat, 7.0, dtype=bucket.layout.dtype)

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
    monkeypatch.setattr(applying, "compiled_loops", lambda: events.append("compiled"))
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
