"""One algorithm file, two interpreters: what loopback carries out is what the clocked runner prices."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Gossip, GossipGraD, Hierarchical, loopback
from gossamer.algorithms import Algorithm, in_parts
from gossamer.buckets import Plan
from gossamer.comm.topology import RandomMatching, ShiftOne, Topology, rotated
from gossamer.simulate import Compute, Link, step_time

from ..contracts.cases import Oddities, batch, make_training, plain, tap

FAST = Link(bandwidth=1e9, latency=1e-3)
STEPS = 4

ADAM = 2
"""What it remembers of each weight."""

IN_PARTS = [in_parts(2, GossipGraD(bucket_bytes=100)), in_parts(2, Gossip(bucket_bytes=100))]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("algorithm", [*plain(bucket_bytes=200), *IN_PARTS], ids=repr)
def test_operations_bytes_and_messages_agree(algorithm: Algorithm, world: int) -> None:
    counted_steps = max(STEPS - 2, algorithm.cadence.period)

    def body(rank: int) -> tuple[dict, dict, Plan | None]:
        tape: dict[tuple[int, int], list[str]] = {}
        model, optimizer, replica = make_training(tap(algorithm, tape))
        for step in range(2 + counted_steps):
            if step == 2:
                before = replica.metrics()
            optimizer.zero_grad()
            # An optimizer that remembers nothing of a weight has nothing to send of it.
            (model(batch(step, rank)) + (0 * model.unused.sum() if algorithm.traits.history else 0)).backward()
            optimizer.step()
        counted = {key: replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")}
        plan = replica._gradients.exchange.plan if replica._gradients is not None else None
        replica.close()
        return tape, counted, plan

    looped = loopback(body, world)
    clocked: dict[tuple[int, int], list[str]] = {}
    plan = looped[0][2] or Oddities()
    if isinstance(plan, Plan):  # whose algorithms write on the other tape
        plan = Plan(tuple(replace(layout, handler=tap(layout.handler.inner, clocked)) for layout in plan.layouts))
    options = {"world": world, "link": FAST, "compute": Compute(forward=1, backward=1), "history": ADAM}
    step_time(plan, tap(algorithm, clocked), **options, steps=STEPS, warmup=0)

    # In its first step a gradient algorithm has not learned the order of the buckets yet.
    known = {place for place in clocked if place[0] > (0 if algorithm.subject == "gradients" else -1)}
    assert len({place for place in known if place[0] == 2}) >= 3, "several buckets"
    for tape, counted, _ in looped[:1] if isinstance(algorithm, Hierarchical) else looped:  # the clock is a leader's
        assert {place for place in known if place[0] < STEPS} <= set(tape)
        result = step_time(plan, tap(algorithm, {}), **options, steps=counted_steps, warmup=2)
        assert result.messages_per_step * counted_steps == counted["messages_sent"]
        if "ChunkSparse" in repr(algorithm):  # as many chunks, but without values it does not know of which buckets
            assert result.bytes_per_step * counted_steps == pytest.approx(counted["bytes_sent"], rel=0.02, abs=8)
            continue
        assert {place: tape[place] for place in known & set(tape)} == {place: clocked[place] for place in known & set(tape)}
        assert result.bytes_per_step * counted_steps == counted["bytes_sent"]


@pytest.mark.parametrize("algorithm", [*plain(), *IN_PARTS], ids=repr)
def test_a_tapped_algorithm_says_what_the_one_inside_says(algorithm: Algorithm) -> None:
    """Else the comparison above would be that of another one."""
    said = {name: value for name in dir(Algorithm) if not callable(value := getattr(algorithm, name)) and name[0] != "_"}
    assert {"traits", "cadence", "bucket_bytes", "subject"} <= set(said)
    assert {name: getattr(tap(algorithm, {}), name) for name in said} == said


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
    options = {"world": world, "link": FAST, "compute": Compute(forward=1, backward=1)}
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
