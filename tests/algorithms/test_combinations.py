"""Algorithms made of others: every part at its own time, and what one of a kind cannot do is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import gossamer
from contracts.cases import bucket_of, tapped
from contracts.laws import MetaPort
from gossamer import (
    AllReduce,
    ChunkSparse,
    Gossip,
    GossipGraD,
    Hierarchical,
    PowerSGD,
    ScatterReduce,
    after,
    by_size,
    in_parts,
    loopback,
)
from gossamer.algorithms.base import Context
from gossamer.bucket_plan import make_plan
from gossamer.comm.loopback import LoopbackRunner
from gossamer.comm.ops import drive
from gossamer.comm.topology import Exchange, Hypercube, Permutation, Topology
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, step_time
from gossamer.state import State


class OneWay(Topology):
    """Ranks 0 and 1 exchange; nobody else ever does."""

    def at(self, step: int, world: int) -> Exchange:
        return Exchange(world, (Permutation((1, 0, *range(2, world))),))


def train(algorithm: gossamer.Algorithm, world: int, steps: int, make: Callable[..., Optimizer] = SGD) -> list[list[Tensor]]:
    """Every worker pulls its weights towards its rank; weights and bias of each after ``steps`` steps."""

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(20, 3)
        optimizer = make(model.parameters(), lr=0.05)
        gossamer.replicate(model, optimizer, algorithm)
        for _ in range(steps):
            optimizer.zero_grad()
            sum((p - rank).square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    return loopback(body, world)


OUTER = [
    Gossip(every=3),
    after(3, Gossip()),
    after(3, AllReduce(), before=Gossip()),
    after(3, Gossip(), before=ScatterReduce()),
    by_size(100, small=Gossip(every=2), large=Gossip()),
]


@pytest.mark.parametrize("outer", OUTER, ids=repr)
def test_workers_of_one_machine_stay_equal_whatever_machines_do_when(outer: gossamer.Algorithm) -> None:
    found = train(Hierarchical(outer, ranks_per_node=2), world=4, steps=8)
    for mine, neighbour in (found[:2], found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(mine, neighbour, strict=True))


def test_by_size_lets_every_part_keep_its_own_steps() -> None:
    """The weight is large and the bias small: each ends as if its part had been alone."""
    both = train(by_size(100, small=Gossip(every=2), large=Gossip(every=3)), world=4, steps=7)
    small, large = train(Gossip(every=2), world=4, steps=7), train(Gossip(every=3), world=4, steps=7)
    for (weight, bias), (_, only_bias), (only_weight, _) in zip(both, small, large, strict=True):
        assert torch.equal(weight, only_weight)
        assert torch.equal(bias, only_bias)


def test_a_simulated_part_keeps_its_own_steps() -> None:
    def bytes_of(algorithm: gossamer.Algorithm) -> float:
        model = nn.Linear(20, 3)
        compute = Compute.uniform(model, forward=0.1, backward=0.2, optimizer=0.01)
        return step_time(
            model, algorithm, world=4, link=Link(bandwidth=1e9, latency=0), compute=compute, steps=6
        ).bytes_per_step

    weight, bias = 60 * 2, 3 * 2  # in bf16
    assert bytes_of(Gossip()) == weight + bias
    assert bytes_of(by_size(100, small=Gossip(every=2), large=Gossip(every=3))) == weight / 3 + bias / 2


def test_by_size_exchanges_what_the_optimizer_remembers() -> None:
    def body(rank: int) -> list[str]:
        model = nn.Linear(20, 3)
        optimizer = Adam(model.parameters())
        replica = gossamer.replicate(model, optimizer, by_size(100, small=GossipGraD(), large=GossipGraD(wire="fp16")))
        for _ in range(2):
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
        return [name for bucket in replica._weights[0].exchange.buckets for name in bucket.layout.names]

    for names in loopback(body, 2):
        assert {"weight", "exp_avg of weight", "exp_avg_sq of weight", "bias", "exp_avg of bias"} <= set(names)


@pytest.mark.parametrize("outer", [ChunkSparse(chunk=4), PowerSGD(rank=1), ScatterReduce(), AllReduce(wire="fp16")], ids=repr)
def test_on_one_machine_nothing_is_lost_for_others(outer: gossamer.Algorithm) -> None:
    found, exact = (train(Hierarchical(each, ranks_per_node=3), world=3, steps=4) for each in (outer, AllReduce()))
    assert all(torch.equal(a, b) for a, b in zip(found[0], exact[0], strict=True))


def test_buckets_are_as_long_as_what_is_inside_has_them() -> None:
    sparse = ChunkSparse(chunk=2**10, bucket_bytes=2**14)
    for algorithm in (Hierarchical(sparse), after(3, sparse), by_size(9, small=AllReduce(), large=sparse)):
        assert algorithm.bucket_bytes == sparse.bucket_bytes
    assert Hierarchical().bucket_bytes == AllReduce().bucket_bytes
    for outer in (in_parts(2, Gossip(bucket_bytes=300)), after(3, Gossip(bucket_bytes=300), before=sparse)):
        assert Hierarchical(outer).bucket_bytes == 300
    model = {str(number): torch.empty(2**10, 2, device="meta") for number in range(8)}
    both = Hierarchical(Gossip(), inner=sparse)
    for algorithm in (Hierarchical(sparse), Hierarchical(Gossip(), bucket_bytes=2**14).part("weights"), both.part("gradients")):
        assert algorithm is not None
        assert [len(layout.names) for layout in make_plan(model, algorithm).layouts] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("outer", "message"),
    [(Gossip(topology=Hypercube()), "3 ranks are not a power of two"), (Gossip(topology=OneWay()), "does not connect 3 ranks")],
)
@pytest.mark.parametrize("per_node", [None, 2])
def test_a_topology_is_checked_for_the_number_of_machines(
    outer: gossamer.Algorithm, message: str, per_node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six workers on three machines, known from the launcher or as given."""
    monkeypatch.setattr(LoopbackRunner, "nodes", ((0, 1), (2, 3), (4, 5)))

    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        algorithm = after(3, Hierarchical(outer, ranks_per_node=per_node))
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1), algorithm)

    with pytest.raises(ConfigurationError, match=message):
        loopback(body, 6)
    Hierarchical(Gossip(topology=Hypercube()), ranks_per_node=3).check(12)


@pytest.mark.parametrize("per_node", [2, 3])
def test_the_consensus_is_what_machines_agree_on_however_many_workers_each_has(per_node: int) -> None:
    """Machines count alike in what they exchange, so they do in the mean of the replicas."""
    sizes = {2: (2, 2, 1), 3: (3, 2)}[per_node]

    def body(rank: int) -> tuple[float, float, float, float]:
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False))
        machine = rank // per_node
        optimizer = SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, Hierarchical(Gossip(wire="fp32"), ranks_per_node=per_node))
        weight, mean = model[0].weight, model[1].running_mean
        assert isinstance(mean, Tensor)
        for step in range(12):
            if step == 0:
                with torch.no_grad():
                    weight.fill_(float(machine))
                    mean.fill_(float(rank))
            model[1].eval()
            model(torch.zeros(4, 3)).sum().backward()
            optimizer.step()
            if step == 0:
                with replica.consensus():
                    early = float(weight.detach().mean()), float(mean.mean())
        replica.close(average=True)
        return *early, float(weight.detach().mean()), float(mean.mean())

    ranks = [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
    machines = sum(range(len(sizes))) / len(sizes)
    of_ranks = sum(sum(each) / len(each) for each in ranks) / len(sizes)
    for found in loopback(body, sum(sizes)):
        assert found == pytest.approx((machines, of_ranks) * 2, abs=1e-4)


MIXED = [
    by_size(100, small=Gossip(), large=after(3, Gossip(), before=AllReduce())),
    by_size(100, small=Hierarchical(Gossip(), ranks_per_node=2), large=Gossip()),
    by_size(100, small=Gossip(), large=GossipGraD()),
]


@pytest.mark.parametrize("algorithm", MIXED, ids=repr)
def test_parts_of_by_size_may_move_gradients_as_well(algorithm: gossamer.Algorithm) -> None:
    """The mean of the workers moves as under an exact all-reduce, because every pull is linear."""
    found, exact = (torch.stack([row[0] for row in train(each, world=4, steps=9)]) for each in (algorithm, AllReduce()))
    torch.testing.assert_close(found.mean(0), exact.mean(0), atol=2e-2, rtol=2e-2)
    alone = torch.stack([row[0] for row in train(Gossip(every=1000), world=4, steps=9)])
    assert found.std(0).norm() < 0.6 * alone.std(0).norm(), "that would hold if nothing were exchanged"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_size(9, small=GossipGraD(late=True), large=GossipGraD()), "give both the same late="),
        (lambda: by_size(9, small=Gossip(), large=AllReduce()), "both must move the same"),
    ],
)
def test_what_by_size_cannot_combine(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "algorithm",
    [
        after(3, AllReduce(), before=AllReduce(bucket_bytes=1)),
        after(3, AllReduce(), before=None),
        Hierarchical(AllReduce(), ranks_per_node=2),
        Hierarchical(Gossip(), ranks_per_node=2).part("gradients"),
    ],
    ids=repr,
)
def test_short_buckets_overtake_in_combinations_too(algorithm):
    """They are gathered from all together, where a ring of messages would wait for what longer buckets have sent."""
    bucket = bucket_of([(20_000,)], torch.float32, "meta")

    def asked(ctx: Context) -> list[str]:
        tape: list[str] = []
        drive(tapped(algorithm.exchange(bucket, State(bucket.flat), ctx), tape), MetaPort(4))
        return [op.partition("(")[0] for op in tape if op.startswith("start")]

    ctx = Context(1, 0, (0, 1, 2, 3))
    assert "start all_gather" not in asked(ctx)
    assert "start all_gather" in asked(replace(ctx, overtakes=True))


@pytest.mark.parametrize(
    "algorithm",
    [
        Hierarchical(ChunkSparse(chunk=4), ranks_per_node=2),
        Hierarchical(AllReduce(), inner=ChunkSparse(chunk=4), ranks_per_node=2),
        Hierarchical(Gossip(), inner=ChunkSparse(chunk=4), ranks_per_node=2),
    ],
    ids=repr,
)
def test_all_workers_number_their_flows_alike(algorithm):
    """With a machine of one worker, too: a rank that leaves is not taken for one that has left too early."""

    def body(rank: int) -> int:
        torch.manual_seed(0)
        model = nn.Linear(20, 3)
        optimizer = SGD(model.parameters(), lr=0.05)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
        submitted = replica._runner._submitted
        replica.close()
        return submitted

    assert len(set(loopback(body, 5))) == 1
