"""What is predicted to travel is what a training loop counts in loopback."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from gossamer import AllReduce, ChunkSparse, DiLoCo, Gossip, GossipGraD, LowPrecisionDecentralized, loopback
from gossamer.algorithms import Algorithm, in_parts
from gossamer.codecs import TopPerChunk
from gossamer.comm.topology import RandomMatching, ShiftOne, Topology, rotated
from gossamer.optim import LAMB, LARS, GossipAdamW, OneBitAdam, QAdam
from gossamer.simulate import Compute, Link, step_time

from ..contracts.cases import Oddities, batch, make_training, plain

FAST = Link(bandwidth=1e9, latency=1e-3)
COMPUTE = Compute(forward=1, backward=1)

IN_PARTS = [in_parts(2, GossipGraD(bucket_bytes=100)), in_parts(2, Gossip(bucket_bytes=100))]
SPARSE = DiLoCo(every=2, bucket_bytes=200, averaging=LowPrecisionDecentralized(codec=TopPerChunk(density=0.3, chunk=64)))
"""Gossip in two bits with an outer momentum."""


def loss(model: Oddities, step: int, rank: int) -> Tensor:
    """Of all parameters: in a prediction each has a gradient."""
    return model(batch(step, rank)) + 0 * model.unused.sum()


def in_order_of_gradients() -> Compute:
    """A profile in which gradients come in the order in which they do."""
    model, came = Oddities(), []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    loss(model, 0, 0).backward()
    return Compute(forward=1, backward=1, ready={name: place / len(came) for place, name in enumerate(came)})


def counted(algorithm: Algorithm, world: int, first: int, steps: int) -> list[float]:
    """Bytes and messages of rank 0 per step, in the mean over ``steps`` steps of a loop after ``first`` ones."""

    def body(rank: int) -> list[float]:
        model, optimizer, replica = make_training(algorithm)
        for step in range(first + steps):
            if step == first:
                before = replica.metrics()
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        after = replica.metrics()
        replica.close()
        return [(after[key] - before[key]) / steps for key in ("bytes_sent", "messages_sent")]

    return loopback(body, world)[0]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("algorithm", [*plain(bucket_bytes=200), *IN_PARTS, SPARSE], ids=repr)
def test_bytes_and_messages_are_those_of_a_loop(algorithm: Algorithm, world: int) -> None:
    steps = algorithm.cadence.cycle(world, world)
    first = max(algorithm.cadence.changes, default=0) + algorithm.cadence.period + 4
    takes_momentum = isinstance(algorithm, ChunkSparse) and algorithm.momentum_correction
    optimizer = partial(SGD, lr=0.1, momentum=0.9) if takes_momentum else AdamW
    options = {"compute": in_order_of_gradients(), "optimizer": optimizer, "steps": 1, "warmup": 4}
    found = step_time(Oddities(), algorithm, world=world, link=FAST, **options)
    # As many chunks, but without values it is not known of which buckets.
    slack = {"rel": 0.02, "abs": 8} if "ChunkSparse" in repr(algorithm) else {"rel": 1e-12}
    bytes_sent, messages = counted(algorithm, world, first, steps)
    assert found.bytes_per_step == pytest.approx(bytes_sent, **slack)
    assert found.messages_per_step == pytest.approx(messages, rel=1e-12)


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("topology", [ShiftOne(), RandomMatching(seed=1), rotated(ShiftOne(), 2)], ids=repr)
def test_a_rank_that_has_a_bye_sends_nothing(topology: Topology, world: int) -> None:
    """As many bytes and messages as it met others; the clock counts rank 0's."""
    steps = 11  # and the one before them: whole cycles

    def body(rank: int) -> list[int]:
        model = nn.Linear(6, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32", topology=topology))
        before = replica.metrics()
        for _ in range(steps):
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        return [replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")]

    ranks = loopback(body, world)
    for rank, counted in enumerate(ranks):
        met = sum(len(topology.at(step, world).destinations(rank)) for step in range(1, steps + 1))
        assert counted == [24 * met, met]
    assert sum(messages for _, messages in ranks) == steps * (world - 1)
    options = {"world": world, "link": FAST, "compute": COMPUTE}
    algorithm = Gossip(wire="fp32", topology=topology)
    result = step_time(nn.Linear(6, 1, bias=False), algorithm, **options, steps=steps + 1, warmup=0)
    assert [result.bytes_per_step * (steps + 1), result.messages_per_step * (steps + 1)] == ranks[0]
    assert result.wire_seconds * (steps + 1) == pytest.approx(steps * 24 * 8 / FAST.bandwidth)


class Normed(nn.Module):
    """A model whose buffers have to be kept together, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffers", ["broadcast", "average", "local", None])
@pytest.mark.parametrize("algorithm", [AllReduce(), gossamer.Gossip()], ids=repr)
def test_module_buffers_are_priced(algorithm: Algorithm, buffers, dtype: torch.dtype) -> None:
    def body(rank: int) -> list[float]:
        model = Normed().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, buffers=buffers)
        for step in range(3):
            before = replica.metrics()
            optimizer.zero_grad()
            model(torch.randn(8, 5, dtype=dtype)).backward()
            optimizer.step()
            sent = [replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")]
        replica.close()
        return sent

    compute = Compute(forward=1, backward=1)
    result = step_time(Normed().to(dtype), algorithm, world=3, link=FAST, compute=compute, buffers=buffers)
    assert loopback(body, 3)[0] == [result.bytes_per_step, result.messages_per_step], "of rank 0, from which broadcasts come"


def test_broadcasts_of_buffers_are_exposed() -> None:
    times = [
        step_time(Normed(), AllReduce(), world=4, link=FAST, compute=Compute(forward=1, backward=1), buffers=buffers)
        for buffers in ("local", "broadcast")
    ]
    # Of two dtypes (the counters of batches are int64), in one message that is two rounds deep.
    assert times[1].exposed_seconds - times[0].exposed_seconds == pytest.approx(2e-3, rel=0.05)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_what_any_optimizer_remembers_is_found_in_its_first_step(name: str) -> None:
    """As many bytes as in a loop, where it travels with the weights; what no replica takes is refused as there."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))  # of matrices, for methods that want them

    def body(rank: int) -> float:
        mine = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
        optimizer = OPTIMIZERS[name](mine.parameters())
        replica = gossamer.replicate(mine, optimizer, GossipGraD())
        for _ in range(4):
            before = replica.metrics()["bytes_sent"]
            optimizer.zero_grad()
            mine(torch.randn(3, 6)).square().sum().backward()
            optimizer.step()
        sent = replica.metrics()["bytes_sent"] - before
        replica.close()
        return sent

    def predicted() -> float:
        return step_time(model, GossipGraD(), world=2, link=FAST, compute=COMPUTE, optimizer=OPTIMIZERS[name]).bytes_per_step

    try:
        sent = loopback(body, 2)[0]
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            predicted()
        assert name in ("LBFGS", "SparseAdam"), "no other is refused"
    else:
        assert predicted() == sent


def test_an_optimizer_that_communicates_by_itself_is_predicted() -> None:
    """Of the steps after its warm-up; as many bytes and messages as in a loop."""

    def body(rank: int) -> list[float]:
        model = nn.Linear(40, 30)
        optimizer = OneBitAdam(model.parameters(), warmup=2)
        replica = gossamer.replicate(model, optimizer)
        for _ in range(6):
            before = replica.metrics()
            optimizer.zero_grad()
            model(torch.randn(3, 40)).square().sum().backward()
            optimizer.step()
        return [replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")]

    make = partial(OneBitAdam, warmup=2)
    found = step_time(nn.Linear(40, 30), None, world=3, link=FAST, compute=COMPUTE, optimizer=make, warmup=4)
    assert [found.bytes_per_step, found.messages_per_step] == loopback(body, 3)[0]


@pytest.mark.parametrize("make", [GossipAdamW, LAMB, LARS, QAdam])
def test_the_project_s_own_optimizers_are_predicted(make: type[Optimizer]) -> None:
    algorithm = None if make is QAdam else Gossip()
    found = step_time(nn.Linear(40, 30), algorithm, world=3, link=FAST, compute=COMPUTE, optimizer=partial(make, lr=0.1))
    assert found.bytes_per_step > 0


@pytest.mark.parametrize(
    "make",
    [partial(SGD, lr=0.1, momentum=0.9, fused=True), *(partial(AdamW, **{way: True}) for way in ("fused", "capturable"))],
)
def test_an_optimizer_s_kernels_for_devices_change_nothing(make: partial[Optimizer]) -> None:
    usual = partial(make.func, **{name: value for name, value in make.keywords.items() if value is not True})
    found = [
        step_time(nn.Linear(40, 30), GossipGraD(), world=3, link=FAST, compute=COMPUTE, optimizer=each)
        for each in (make, usual)
    ]
    assert found[0] == found[1]
