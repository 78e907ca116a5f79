"""Push-sum: sums stay, ratios agree, on graphs where averages would drift."""

import copy
import random
from functools import partial

import pytest
import torch

import gossamer
from gossamer import Gossip, Hierarchical, PushSum, after, in_parts
from gossamer.algorithms.base import Context
from gossamer.comm.digraph import OutNeighbours, RandomPush, digraph
from gossamer.comm.topology import Complete, Dissemination, Ring
from gossamer.errors import ConfigurationError
from gossamer.state import State

from ..contracts.cases import bucket_of, exchange, gossip, noise, stacked

UNEVEN = OutNeighbours(((1, 2, 3), (2,), (0,), (0, 2)))
STAR = OutNeighbours(((1, 2, 3), (0,), (0,), (0,)))


@pytest.mark.parametrize("topology", [UNEVEN, RandomPush(), RandomPush(peers=2, seed=1)], ids=str)
def test_all_workers_tend_to_the_mean_on_an_uneven_graph(topology):
    tensors = noise(4, 50, torch.float64)
    together = torch.stack(gossip(PushSum(topology=topology), tensors, 80))
    assert torch.allclose(together, torch.stack(tensors).mean(0).expand(4, -1), rtol=0, atol=1e-9)


def test_plain_averages_would_not():
    """The law above can fail: with the weights left out, those who are heard most decide."""
    from gossamer.comm.digraph import push_matrix

    values = torch.stack(noise(4, 50, torch.float64))
    rows = torch.tensor(push_matrix(UNEVEN.at(0, 4)), dtype=torch.float64)
    mixed = torch.linalg.matrix_power(rows / rows.sum(1, keepdim=True), 80) @ values
    assert (mixed - values.mean(0)).abs().max() > 0.1


@pytest.mark.parametrize("topology", [UNEVEN, RandomPush(seed=2), Ring(), Complete()], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_sums_and_weights_are_conserved_on_every_wire(topology, wire):
    tensors = noise(4, 60)
    outcomes = exchange(PushSum(topology=topology, wire=wire), [tensors])
    sums = torch.stack([outcome.state["push-sum"] for outcome in outcomes])
    weights = torch.stack([outcome.state.extra("push-sum weight") for outcome in outcomes])
    assert weights.sum().item() == pytest.approx(4.0, abs=1e-12)
    assert torch.allclose(sums.double().sum(0), torch.stack(tensors).double().sum(0), rtol=0, atol=2e-6)
    for outcome, tensor, weight, total in zip(outcomes, tensors, weights, sums, strict=True):
        assert torch.allclose(tensor + outcome.results[0], total / weight.item(), atol=1e-6)


def with_losses(algorithm, values, steps, lost):
    """Exchanges among ``values`` by hand: of every message, ``lost(step, sender, receiver)`` says whether it never comes."""
    world, values = len(values), [value.clone() for value in values]
    buckets = [bucket_of([value.shape], value.dtype) for value in values]
    states = [State(bucket.flat) for bucket in buckets]
    for step in range(steps):
        for bucket, value in zip(buckets, values, strict=True):
            bucket.flat.copy_(value)
        graph = digraph(algorithm.topology.at(step, world))
        contexts = [Context(step, rank, tuple(range(world))) for rank in range(world)]
        flows = [algorithm.exchange(b, s, c) for b, s, c in zip(buckets, states, contexts, strict=True)]
        sent = [[next(flow).op.tensor, flow.send("sums").op.tensor] for flow in flows]
        for rank, flow in enumerate(flows):
            come = [source for source in graph.sources(rank) if not lost(step, source, rank)]
            sums, shares = (torch.stack([sent[s][i] for s in come]) if come else sent[0][i].new_empty(0, 1) for i in (0, 1))
            assert flow.send("shares").handle == "sums"
            assert flow.send(sums).handle == "shares"
            with pytest.raises(StopIteration) as ended:
                flow.send(shares)
            values[rank].add_(ended.value.value)
            states[rank].commit()
    return torch.stack(values)


@pytest.mark.parametrize("topology", [UNEVEN, RandomPush(seed=3), Ring(), Dissemination()], ids=str)
def test_a_lost_message_takes_its_weight_with_it(topology):
    """Workers that agree stay where they are, and others come to agree, whatever is lost; averages would be pulled to zero."""
    chance = random.Random(0)
    drawn = {(step, a, b): chance.random() < 0.3 for step in range(100) for a in range(4) for b in range(4)}
    same = [torch.full((5,), 3.25, dtype=torch.float64)] * 4
    stayed = with_losses(PushSum(topology=topology), same, 30, lambda *message: drawn[message])
    assert torch.allclose(stayed, torch.stack(same), rtol=0, atol=1e-12)
    tensors = noise(4, 5, torch.float64)
    together = with_losses(PushSum(topology=topology), tensors, 100, lambda *message: drawn[message])
    assert torch.allclose(together, together[0].expand(4, -1), rtol=0, atol=1e-6)
    low, high = torch.stack(tensors).aminmax(dim=0)
    assert ((together >= low - 1e-9) & (together <= high + 1e-9)).all()
    nothing_lost = with_losses(PushSum(topology=topology), tensors, 100, lambda *message: False)
    assert torch.allclose(nothing_lost, torch.stack(tensors).mean(0).expand(4, -1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_where_everyone_sends_as_much_as_comes_it_is_gossip(world):
    tensors = noise(world, 40, torch.float64)
    mine = exchange(PushSum(topology=Dissemination()), [tensors])
    theirs = exchange(Gossip(wire="fp32", topology=Dissemination()), [tensors])
    assert torch.allclose(stacked(mine), stacked(theirs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("topology", [UNEVEN, RandomPush()], ids=str)
def test_the_mean_moves_by_the_whole_of_a_constant_update(topology, wire):
    steps, update = 200, 1e-4

    def body(rank):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.add_(0.1 * torch.randn(20, 20, generator=torch.Generator().manual_seed(rank)))
        start = model.weight.detach().clone()
        replica = gossamer.replicate(model, optimizer, PushSum(topology=topology, wire=wire))
        start = model.weight.detach().clone()
        for _ in range(steps):
            optimizer.zero_grad()
            (-update * sum(p.sum() for p in model.parameters())).backward()
            optimizer.step()
        with replica.consensus():
            end = model.weight.detach().clone()
        replica.close()
        return (end - start).mean().item()

    for moved in gossamer.loopback(body, 4):
        assert moved == pytest.approx(steps * update, rel=0.01)


@pytest.mark.parametrize("algorithm", [PushSum(), gossamer.after(2, PushSum()), gossamer.Hierarchical(PushSum())], ids=repr)
def test_running_statistics_do_not_travel_in_sums(algorithm):
    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)

    with pytest.raises(ConfigurationError, match="negative: take buffers"):
        gossamer.loopback(body, 2)


def test_every_rank_counts_what_it_sends_itself():
    star = OutNeighbours(((1, 2, 3), (0,), (0,), (0,)))

    def body(rank):
        model = torch.nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, PushSum(topology=star))
        model(torch.ones(1, 10)).sum().backward()
        before = replica.metrics()["bytes_sent"]
        optimizer.step()
        replica.close()
        return replica.metrics()["bytes_sent"] - before

    assert gossamer.loopback(body, 4) == [3 * 408, 408, 408, 408]


def test_a_resumed_run_goes_on_bit_by_bit():
    def train(steps, resume=None):
        def body(rank):
            torch.manual_seed(0)
            model = torch.nn.Linear(6, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            replica = gossamer.replicate(model, optimizer, PushSum(topology=UNEVEN))
            begin = 0
            if resume is not None:
                saved = resume[rank]
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                replica.load_state_dict(saved["replica"])
                begin = 5
            for step in range(begin, steps):
                data = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
                optimizer.zero_grad()
                model(data).square().sum().backward()
                optimizer.step()
            saved = {
                "replica": replica.state_dict(),
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
            }
            replica.close()
            return saved

        return gossamer.loopback(body, 4)

    whole, resumed = train(9), train(9, resume=train(5))
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PushSum(topology="ring"), "topology must be one of gossamer.comm"),
        (lambda: PushSum(wire="fp8"), "wire must be one of"),
        (lambda: PushSum(every=0), "every must be a number of steps"),
        (lambda: PushSum(topology=OutNeighbours(((1,), ()))).check(2), "never reaches rank 0"),
        (lambda: PushSum(topology=UNEVEN).check(5), "is for 4 ranks; there are 5"),
    ],
)
def test_bad_fields(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("topology", [RandomPush(), UNEVEN, STAR], ids=str)
@pytest.mark.parametrize(
    "wrapped", [lambda push: push, partial(in_parts, 2), partial(after, 3)], ids=["whole", "in parts", "after"]
)
@pytest.mark.parametrize("how", ["consensus", "close"])
def test_the_mean_of_the_replicas_is_the_conserved_one(topology, wrapped, how):
    """It is where all updates of all workers have moved it, however unevenly they are heard. Momentum included."""

    def body(rank):
        model = torch.nn.Linear(6, 2, bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, wrapped(PushSum(topology=topology)))
        for step in range(20):
            optimizer.zero_grad()
            (model.weight.sum() * (rank + 1) * (-1) ** step).backward()
            optimizer.step()
        if how == "close":
            replica.close(average=True)
            return model.weight.detach()
        with replica.consensus():
            return model.weight.detach().clone()

    weight, velocity = 1.0, 0.0
    for step in range(20):
        velocity = 0.9 * velocity + 2.5 * (-1) ** step
        weight -= 0.1 * velocity
    for found in gossamer.loopback(body, 4):
        assert (found - weight).abs().max() < 1e-12


def test_the_mean_inside_the_mean_is_the_same():
    def body(rank):
        model = torch.nn.Linear(6, 2, bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, PushSum(topology=UNEVEN))
        for _ in range(5):
            optimizer.zero_grad()
            (model.weight.sum() * (rank + 1)).backward()
            optimizer.step()
        with replica.consensus():
            outside = model.weight.detach().clone()
            with replica.consensus():
                assert torch.equal(model.weight, outside)
            assert torch.equal(model.weight, outside)
            assert replica.consensus_distance() == 0.0
        assert replica.consensus_distance() > 0.0

    gossamer.loopback(body, 4)


def test_of_machines_that_push_the_mean_is_the_conserved_one():
    def body(rank):
        model = torch.nn.Linear(6, 2, bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Hierarchical(PushSum(topology=RandomPush()), ranks_per_node=2))
        for _ in range(12):
            optimizer.zero_grad()
            (model.weight.sum() * (rank + 1)).backward()
            optimizer.step()
        with replica.consensus():
            return model.weight.detach().clone()

    for found in gossamer.loopback(body, 8):
        assert (found - (1 - 12 * 0.1 * 4.5)).abs().max() < 1e-12


def test_weights_that_are_mended_stay_mended():
    """One NaN is in all sums after a cycle; that of a place is then the weights' own again."""
    tensors, broken = noise(4, 50), noise(4, 50)
    for tensor in broken:
        tensor[7] = float("nan")
    outcomes = exchange(PushSum(topology=UNEVEN), [tensors, broken, tensors, tensors])
    assert stacked(outcomes, 1)[:, 7].isnan().all()
    assert stacked(outcomes, 2).isfinite().all()
    sums = torch.stack([outcome.state["push-sum"] for outcome in outcomes])
    shares = torch.stack([outcome.state.extra("push-sum weight") for outcome in outcomes])
    assert sums.isfinite().all()
    assert shares.sum().item() == pytest.approx(4.0)
