"""Messages in which the next update is foreseen: averages as if everyone had waited for them."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    DecentralizedSGD,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    QuantizedGossip,
    after,
    in_parts,
    loopback,
)
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.cadence import Beat, Cadence
from gossamer.bucket_plan import buffer_name, make_layout
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.comm.topology import Dissemination, Ring, mixing_matrix
from gossamer.engine.ahead import Ahead
from gossamer.errors import ConfigurationError
from gossamer.state import State

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


def averaged_in_step(topology: Dissemination | Ring, steps: int = STEPS) -> Tensor:
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
    assert torch.allclose(found, averaged_in_step(topology), rtol=0, atol=1e-6)
    assert not torch.allclose(trained(Gossip(wire="fp32", topology=topology)), averaged_in_step(topology), rtol=0, atol=1e-3)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_on_a_narrow_wire_up_to_its_rounding(wire: str, dtype: torch.dtype) -> None:
    found = trained(Gossip(wire=wire, ahead=1.0), dtype=dtype)
    assert torch.allclose(found, averaged_in_step(Dissemination()), rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_a_few_bits_up_to_their_rounding(dtype: torch.dtype) -> None:
    found = trained(QuantizedGossip(bits=8, ahead=1.0), dtype=dtype)
    assert torch.allclose(found, averaged_in_step(Dissemination()), rtol=0, atol=0.05)


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
        QuantizedGossip(ahead=1.0),
        in_parts(2, QuantizedGossip(bits=8, ahead=1.0)),
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
    """Three parts: each weight is averaged in every third step, as if all together, and moves by itself in between."""
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


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32, torch.float16])
def test_a_message_is_the_rounded_value_of_what_was_foreseen(wire: torch.dtype) -> None:
    """Of weights as they may lie, to the bit, and of what is infinite or no number."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = [torch.randn(7, 5), image, torch.randn(0, 3), torch.randn(3000)[13:2080]]
    weights[0].view(-1)[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -0.0])
    before = [weight.clone(memory_format=torch.preserve_format) for weight in weights]
    bucket = Bucket(0, make_layout({str(i): weight for i, weight in enumerate(weights)}, message=wire))
    ahead = Ahead()
    for _ in range(2):  # the second time in the same memory
        ahead.remember(bucket, weights)
        for weight in weights:
            weight += 0.01 * torch.randn_like(weight)
        ahead.pack(bucket, weights, 1.0)
        for view, weight, was in zip(bucket.views, weights, before, strict=True):
            torch.testing.assert_close(view, rounded(weight + 1.0 * (weight - was), wire), rtol=0, atol=0, equal_nan=True)
            was.copy_(weight)
    ahead.pack(bucket, weights, 1.0)  # no update was announced
    for view, weight in zip(bucket.views, weights, strict=True):
        torch.testing.assert_close(view, rounded(weight, wire), rtol=0, atol=0, equal_nan=True)


def rounded(values: Tensor, wire: torch.dtype) -> Tensor:
    """In fp16 what is too large is the largest number, and what is not finite is none."""
    return (values.clamp(-65504, 65504) + 0 * values if wire == torch.float16 else values).to(wire)


class Watched(GossipGraD, register=False):
    """Tells of every message of the first worker, by name."""

    sent: ClassVar[list[dict[str, Tensor]]]

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.rank == 0:
            self.sent.append({segment.name: segment.view(bucket.flat).clone() for segment in bucket.segments})
        return (yield from super().exchange(bucket, state, ctx))


def test_what_an_optimizer_remembers_is_sent_as_it_is() -> None:
    """Beside weights that are ahead: it is averaged, too, but a second moment that is foreseen could be negative."""
    Watched.sent = []
    kept: list[dict[str, Tensor]] = []

    def body(rank: int) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Watched(wire="fp32", ahead=1.0))
        before: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: before.append(model.weight.detach().clone()))  # after averages are added
        for step in range(4):
            optimizer.zero_grad()
            (model.weight * (rank + step + 1)).sum().backward()
            optimizer.step()
            if rank == 0:
                now = model.weight.detach().clone()
                kept.append({"weight": now + (now - before[-1])})
                remembered = optimizer.state[model.weight]
                kept[-1] |= {f"{key} of weight": remembered[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        replica.close()

    loopback(body, 2)
    for message, expected in zip(Watched.sent[1:], kept[1:], strict=True):  # its history is known after the first step
        torch.testing.assert_close(message, expected, rtol=0, atol=1e-6)


def test_a_step_that_nothing_was_foreseen_of_sends_the_weights() -> None:
    """Inside ``join()`` a rank without batches answers with what it has, and not with an update of before."""
    Watched.sent = []
    weights: list[Tensor] = []

    def body(rank: int) -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        class Seen(Watched, register=False):
            def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
                if ctx.rank == 0:
                    weights.append(model.weight.detach().clone())
                return (yield from super().exchange(bucket, state, ctx))

        replica = gossamer.replicate(model, optimizer, Seen(wire="fp32", history=False, ahead=1.0))
        with replica.join():
            for _ in range(2 + 3 * rank):
                optimizer.zero_grad()
                (model.weight.sum() * (1 + rank)).backward()
                optimizer.step()
        replica.close()

    loopback(body, 2)
    differ = [not torch.allclose(message["weight"], own) for message, own in zip(Watched.sent, weights, strict=True)]
    assert differ == [True, True, False, False, False]


def test_buffers_are_sent_as_they_are() -> None:
    """No update changes them, but a forward pass in a closure may; a variance that is foreseen could be negative."""
    weight, variance = torch.randn(5), torch.rand(5)
    tensors = {"weight": weight, buffer_name("running_var"): variance}
    bucket = Bucket(0, make_layout(tensors, message=torch.float32))
    ahead = Ahead()
    ahead.remember(bucket, [weight, variance])
    was = weight.clone()
    weight += 1
    variance *= 0.1
    ahead.pack(bucket, [weight, variance], 1.0)
    torch.testing.assert_close(bucket.views[0], weight + (weight - was))
    assert torch.equal(bucket.views[1], variance)


def test_how_far_ahead_may_depend_on_the_step() -> None:
    class Later(Gossip, register=False):
        @property
        def cadence(self) -> Cadence:
            return Cadence((Beat(until=4), Beat(first=4, ahead=1.0)))

    plain, late = trained(Gossip(wire="fp32")), trained(Later(wire="fp32"))
    assert torch.equal(late[:4], plain[:4])
    assert not torch.allclose(late[5], plain[5], rtol=0, atol=1e-3)


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
        (lambda: QuantizedGossip(ahead=-1), "ahead must be a number of updates"),
        (lambda: QuantizedGossip(ahead=1.0, lag=1), "ahead does not go with lag"),
        (lambda: Gossip(ahead=True), "ahead must be a number of updates"),
        (lambda: Gossip(ahead=1.0, lag=2), "ahead does not go with lag"),
        (lambda: GossipGraD(ahead=1.0, late=True), "ahead does not go with late=True"),
        (lambda: after(2, Gossip(ahead=1.0), before=GossipGraD(late=True)), "added after the update that ahead= foresees"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
