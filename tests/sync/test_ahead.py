"""Messages in which the next update is foreseen: averages as if everyone had waited for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
import gossamer.sync.ahead as ahead_module
from gossamer import AllReduce, DecentralizedSGD, Gossip, GossipGraD, GossipPGA, Hierarchical, after, in_parts, loopback
from gossamer.algorithms.base import Algorithm
from gossamer.buckets import Bucket, make_layout
from gossamer.comm.topology import Dissemination, Ring, mixing_matrix
from gossamer.errors import ConfigurationError
from gossamer.sync.ahead import Ahead

WORLD, STEPS, SIZE = 4, 9, 30


def trained(
    algorithm: Algorithm, steps: int = STEPS, momentum: float = 0.0, dtype: torch.dtype = torch.float64, alike: int = 1
) -> Tensor:
    """The weights of all workers after each step, ``[steps, workers, elements]``; each has a constant gradient of its own.

    ``alike``: how many consecutive workers begin with the same weights.
    """

    def body(rank: int) -> Tensor:
        model = nn.Linear(SIZE, 1, bias=False, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        replica = gossamer.replicate(model, optimizer, algorithm)
        with torch.no_grad():
            model.weight.copy_(begin(rank // alike))
        seen = []
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight * slope(rank)).sum().backward()
            optimizer.step()
            seen.append(model.weight.detach().double().flatten().clone())
        replica.close()
        return torch.stack(seen)

    return torch.stack(loopback(body, WORLD)).transpose(0, 1)


def begin(rank: int) -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def slope(rank: int) -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def averaged_at_once(topology: Dissemination | Ring, steps: int = STEPS) -> Tensor:
    """The same training, where everyone waits after each update until weights are averaged (from the second one on)."""
    weights = torch.cat([begin(rank) for rank in range(WORLD)])
    updates = -0.1 * torch.cat([slope(rank) for rank in range(WORLD)])
    seen = []
    for step in range(steps):
        weights = weights + updates
        if step > 0:
            weights = torch.tensor(mixing_matrix(topology.at(step, WORLD)), dtype=torch.float64) @ weights
        seen.append(weights)
    return torch.stack(seen)


@pytest.mark.parametrize("topology", [Dissemination(), Ring()], ids=repr)
def test_where_updates_are_foreseen_averages_are_not_older_than_the_weights(topology: Dissemination | Ring) -> None:
    """With one partner by way of messages, with several by way of the weights."""
    found = trained(Gossip(wire="fp32", topology=topology, ahead=1.0))
    assert torch.allclose(found, averaged_at_once(topology), rtol=0, atol=1e-6)
    assert not torch.allclose(trained(Gossip(wire="fp32", topology=topology)), averaged_at_once(topology), rtol=0, atol=1e-3)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_on_a_narrow_wire_up_to_its_rounding(wire: str, dtype: torch.dtype) -> None:
    found = trained(Gossip(wire=wire, ahead=1.0), dtype=dtype)
    assert torch.allclose(found, averaged_at_once(Dissemination()), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(ahead=0.7),
        Gossip(ahead=1.0, every=2),
        DecentralizedSGD(ahead=1.0),
        GossipPGA(ahead=1.0, period=3),
        GossipGraD(ahead=1.0),
        GossipGraD(ahead=1.0, bucket_bytes=1),  # what an optimizer remembers has buckets of its own
        GossipGraD(ahead=1.0, history=False),
        in_parts(3, Gossip(ahead=1.5)),
        after(3, Gossip(ahead=1.0), before=DecentralizedSGD()),
    ],
    ids=repr,
)
def test_the_mean_moves_as_without_it(algorithm: Algorithm) -> None:
    """Each worker's update is its own, whatever was foreseen of it."""
    alone = torch.cat([begin(rank) for rank in range(WORLD)]).mean(0)
    update = velocity = torch.zeros(SIZE, dtype=torch.float64)
    for weights in trained(algorithm, momentum=0.9):
        velocity = 0.9 * velocity + torch.cat([slope(rank) for rank in range(WORLD)]).mean(0)
        update = update - 0.1 * velocity
        assert torch.allclose(weights.mean(0), alone + update, rtol=0, atol=1e-5)


def test_each_part_is_ahead_in_its_own_turn() -> None:
    """Three parts: each weight is averaged in every third step, as if at once, and moves by itself in between."""
    found = trained(in_parts(3, Gossip(wire="fp32", ahead=1.0)))
    weights = torch.cat([begin(rank) for rank in range(WORLD)])
    updates = -0.1 * torch.cat([slope(rank) for rank in range(WORLD)])
    for step in range(STEPS):
        weights = weights + updates
        part = slice(SIZE * (step % 3) // 3, SIZE * (step % 3 + 1) // 3)
        if step > 0:
            matrix = torch.tensor(mixing_matrix(Dissemination().at(step // 3, WORLD)), dtype=torch.float64)
            weights[:, part] = matrix @ weights[:, part]
        assert torch.allclose(found[step], weights, rtol=0, atol=1e-6)


def test_replicas_are_closer_where_momentum_makes_updates_alike() -> None:
    def apart(algorithm: Algorithm) -> Tensor:
        weights = trained(algorithm, steps=40, momentum=0.9)[-1]
        return (weights - weights.mean(0)).norm()

    assert apart(Gossip(ahead=1.0)) < 0.8 * apart(Gossip())


@pytest.mark.parametrize("compiled", [True, False])
def test_a_message_is_the_rounded_value_of_what_was_foreseen(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights as they may lie, to the bit, and of what is infinite or no number."""
    if not compiled:
        monkeypatch.setattr(ahead_module, "compiled_loops", lambda: None)
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = [torch.randn(7, 5), image, torch.randn(0, 3), torch.randn(3000)[13:2080]]
    weights[0].view(-1)[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -0.0])
    before = [weight.clone(memory_format=torch.preserve_format) for weight in weights]
    bucket = Bucket(0, make_layout({str(i): weight for i, weight in enumerate(weights)}, message=torch.bfloat16))
    ahead = Ahead()
    for _ in range(2):  # the second time in the same memory
        ahead.remember(bucket, weights)
        for weight in weights:
            weight += 0.01 * torch.randn_like(weight)
        ahead.lay_out(bucket, weights, 1.0)
        for view, weight, was in zip(bucket.views, weights, before, strict=True):
            torch.testing.assert_close(view, (weight + 1.0 * (weight - was)).bfloat16(), rtol=0, atol=0, equal_nan=True)
            was.copy_(weight)
    ahead.drop()
    ahead.lay_out(bucket, weights, 1.0)  # no update was announced
    for view, weight in zip(bucket.views, weights, strict=True):
        torch.testing.assert_close(view, weight.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_what_an_optimizer_remembers_is_sent_as_it_is() -> None:
    """It is averaged, too, but not foreseen: a second moment could become negative."""
    sent: list[dict[str, Tensor]] = []

    class Watched(GossipGraD, register=False):
        def exchange(self, bucket, state, ctx):  # type: ignore[no-untyped-def]
            if ctx.rank == 0:
                sent.append({segment.name: segment.view(bucket.flat).clone() for segment in bucket.segments})
            return (yield from super().exchange(bucket, state, ctx))

    kept: list[dict[str, Tensor]] = []

    def body(rank: int) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Watched(wire="fp32", ahead=1.0))
        for step in range(3):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            (model.weight * (rank + step + 1)).sum().backward()
            replica.wait_for_exchanges()
            optimizer.step()
            if rank == 0:
                kept.append({key: value.clone() for key, value in optimizer.state[model.weight].items()} | {"was": before})

    loopback(body, 2)
    for message, state in zip(sent[1:], kept[1:], strict=True):
        assert torch.equal(message["exp_avg of weight"], state["exp_avg"])
        assert torch.equal(message["exp_avg_sq of weight"], state["exp_avg_sq"])


def test_a_step_that_nothing_was_foreseen_of_sends_the_weights() -> None:
    """Between machines, inside ``join()`` a rank without batches: what it sends is what it has."""

    def body(rank: int) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32", ahead=1.0))
        with torch.no_grad():
            model.weight.fill_(float(rank))
        with replica.join():
            for _ in range(2 + 2 * rank):
                optimizer.zero_grad()
                (0 * model.weight).sum().backward()
                optimizer.step()
        replica.close()
        return model.weight.detach().clone()

    for weights in loopback(body, 2):
        assert torch.equal(weights, torch.full((1, 2), 0.5))


def test_between_machines() -> None:
    found = trained(Hierarchical(Gossip(wire="fp32", ahead=1.0), inner=AllReduce(), ranks_per_node=2), alike=2)
    assert torch.allclose(found[:, 0], found[:, 1], rtol=0, atol=1e-9)
    without = trained(Hierarchical(Gossip(wire="fp32"), inner=AllReduce(), ranks_per_node=2), alike=2)
    assert torch.allclose(found.mean(1), without.mean(1), rtol=0, atol=1e-6)
    assert (found[-1, 0] - found[-1, 2]).norm() < (without[-1, 0] - without[-1, 2]).norm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gossip(ahead=-0.1), "ahead must be a number of updates from 0 to 2; got -0.1"),
        (lambda: Gossip(ahead=2.1), "from 0 to 2"),
        (lambda: Gossip(ahead=float("nan")), "from 0 to 2"),
        (lambda: Gossip(ahead=True), "ahead must be a number of updates"),
        (lambda: Gossip(ahead=1.0, lag=2), "ahead does not go with lag"),
        (lambda: GossipGraD(ahead=1.0, late=True), "ahead does not go with late=True"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
