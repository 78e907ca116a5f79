"""One algorithm file, two interpreters: what loopback carries out is what the clocked runner prices."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Hierarchical, loopback
from gossamer.algorithms import Algorithm
from gossamer.buckets import plan_from_names
from gossamer.simulate import Compute, Link, step_time

from ..contracts.cases import Oddities, batch, make_training, plain, tap, train_step

FAST = Link(bandwidth=1e9, latency=1e-3)
STEPS = 4


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("algorithm", plain(bucket_bytes=200), ids=repr)
def test_operations_bytes_and_messages_agree(algorithm: Algorithm, world: int) -> None:
    def body(rank: int) -> tuple[dict, dict, list[list[str]]]:
        tape: dict[tuple[int, int], list[str]] = {}
        model, optimizer, replica = make_training(tap(algorithm, tape))
        for step in range(STEPS):
            if step == 2:
                before = replica.metrics()
            train_step(model, optimizer, batch(step, rank))
        counted = {key: replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")}
        plan = replica.state_dict()["plan"]
        replica.close()
        return tape, counted, plan.get("buckets", [])

    looped = loopback(body, world)
    model = Oddities()
    plan = plan_from_names(looped[0][2], dict(model.named_parameters()), algorithm) if looped[0][2] else model
    clocked: dict[tuple[int, int], list[str]] = {}
    options = {"world": world, "link": FAST, "compute": Compute(forward=1, backward=1)}
    step_time(plan, tap(algorithm, clocked), **options, steps=STEPS, warmup=0)

    # In its first step a gradient algorithm has not learned the order of the buckets yet.
    known = {place for place in clocked if place[0] > (0 if algorithm.subject == "gradients" else -1)}
    assert len({place for place in known if place[0] == 2}) >= 3, "several buckets"
    for tape, counted, _ in looped[:1] if isinstance(algorithm, Hierarchical) else looped:  # the clock is a leader's
        assert {place for place in known if place[0] < STEPS} <= set(tape)
        result = step_time(plan, algorithm, **options, steps=2, warmup=2)
        assert result.messages_per_step * 2 == counted["messages_sent"]
        if "QuantizedGossip" in repr(algorithm):  # without values it does not know which exchanges are in full precision
            continue
        if "ChunkSparse" in repr(algorithm):  # as many chunks, but without values it does not know of which buckets
            assert result.bytes_per_step * 2 == pytest.approx(counted["bytes_sent"], rel=0.02, abs=8)
            continue
        assert {place: tape[place] for place in known & set(tape)} == {place: clocked[place] for place in known & set(tape)}
        assert result.bytes_per_step * 2 == counted["bytes_sent"]


class Normed(nn.Module):
    """A model whose buffers have to be kept together, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local", None])
@pytest.mark.parametrize("algorithm", [AllReduce(), gossamer.Gossip()], ids=repr)
def test_module_buffers_are_priced(algorithm: Algorithm, buffers) -> None:
    def body(rank: int) -> float:
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, buffers=buffers)
        for step in range(3):
            before = replica.metrics()["bytes_sent"]
            optimizer.zero_grad()
            model(torch.randn(8, 5)).backward()
            optimizer.step()
            sent = replica.metrics()["bytes_sent"] - before
        replica.close()
        return sent

    result = step_time(Normed(), algorithm, world=3, link=FAST, compute=Compute(forward=1, backward=1), buffers=buffers)
    assert set(loopback(body, 3)) == {result.bytes_per_step}


def test_broadcasts_of_buffers_are_exposed() -> None:
    times = [
        step_time(Normed(), AllReduce(), world=4, link=FAST, compute=Compute(forward=1, backward=1), buffers=buffers)
        for buffers in ("local", "broadcast")
    ]
    # Two dtypes (the counters of batches are int64), each two rounds deep.
    assert times[1].exposed_seconds - times[0].exposed_seconds == pytest.approx(4e-3, rel=0.05)
