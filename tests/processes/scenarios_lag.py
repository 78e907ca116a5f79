"""Scenarios: asynchronous gossip, where ranks are at different steps. Three ranks, the last of them slow."""

import copy
import time
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import (
    AllReduce,
    DecentralizedSGD,
    DiLoCo,
    Gossip,
    GossipGraD,
    LocalSGD,
    LowPrecisionDecentralized,
    PushSum,
    QuantizedGossip,
)
from gossamer.algorithms.base import Algorithm
from gossamer.codecs import Quantize
from gossamer.comm.digraph import RandomPush
from gossamer.comm.torch import groups as torch_groups
from gossamer.data import RingShuffle
from processes.expect import raises
from processes.worker import Here

UPDATE = 1e-3


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 5))


def train(here: Here, algorithm: Algorithm, steps: int, pause: float, momentum: float = 0.0) -> dict[str, Any]:
    """Constant updates; every step takes ``pause`` seconds. How long it took, and the whole model's mean before and after."""
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=momentum)
    replica = here.replicate(model, optimizer, algorithm)
    before = mean_of(model)
    begin = time.monotonic()
    for _ in range(steps):
        optimizer.zero_grad()
        (UPDATE * sum(p.sum() for p in model.parameters())).backward()
        time.sleep(pause)
        optimizer.step()
    seconds = time.monotonic() - begin
    distance = replica.consensus_distance()
    with replica.consensus():
        after = mean_of(model)
    assert replica._runner._policy.in_step == (algorithm.cadence.lag == 0)
    exchanges = replica._weights[0].exchanges
    replica.close()
    return {"seconds": seconds, "moved": before - after, "distance": distance, "exchanges": exchanges, "model": model}


def mean_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.cat([p.reshape(-1).double() for p in model.parameters()]).mean())


SLOW = 0.16
"""Seconds that a step of the slow rank takes."""


def pause_of(here: Here, slow: float = SLOW) -> float:
    return slow if here.rank == here.world - 1 else 0.004


def a_slow_rank_delays_nobody_immediately(here: Here) -> dict[str, float]:
    alike = train(here, Gossip(wire="fp32"), 20, pause_of(here))
    assert alike["seconds"] > 19 * SLOW, "without lag everyone takes as long as the slowest"
    free = train(here, Gossip(wire="fp32", lag=1000), 20, pause_of(here))
    if here.rank < here.world - 1:
        assert free["seconds"] < 0.5 * alike["seconds"], (free["seconds"], alike["seconds"])
    assert abs(free["moved"] - 20 * UPDATE) < 0.01 * 20 * UPDATE
    return {"lag": free["seconds"], "no lag": alike["seconds"]}


def late_deltas_of_a_slow_rank_delay_nobody(here: Here) -> dict[str, float]:
    """At a small part of the others' speed; all deltas are in the mean, the late ones in a later round."""
    times = {}
    for name, averaging in {"all": AllReduce(), "peers": Gossip(wire="fp32")}.items():
        algorithm = DiLoCo(every=4, lag=1000, dense=0, rate=1.0, momentum=0.0, nesterov=False, averaging=averaging)
        free = train(here, algorithm, 20, pause_of(here))
        if here.rank < here.world - 1:
            assert free["seconds"] < 0.5 * 19 * SLOW, (name, free["seconds"])
        assert abs(free["moved"] - 20 * UPDATE) < 0.01 * 20 * UPDATE, (name, free["moved"])
        times[name] = free["seconds"]
    return times


def samples_count_by_rank(here: Here) -> float:
    """Gradients, and weights after some steps alone, of ranks with other batches."""
    for algorithm in (AllReduce(), LocalSGD(every=2, delay=0)):
        model = model_of(here.rank)
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = here.replicate(model, optimizer, algorithm)
        before = mean_of(model)
        for _ in range(2):
            replica.weigh(1 + here.rank)
            optimizer.zero_grad()
            (UPDATE * here.rank * sum(p.sum() for p in model.parameters())).backward()
            optimizer.step()
        replica.close()
        shares = [1 + rank for rank in range(here.world)]
        expected = 2 * UPDATE * sum(rank * share for rank, share in enumerate(shares)) / sum(shares)
        assert abs(before - mean_of(model) - expected) < 1e-6, (algorithm, before - mean_of(model), expected)
    return expected


def a_rank_out_of_line_is_left_out(here: Here) -> float:
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, DiLoCo(every=2, delay=0, rate=1.0, momentum=0.0, nesterov=False, outlier=5.0))
    before = mean_of(model)
    for step in range(4):
        optimizer.zero_grad()
        spoilt = 1000 if here.rank == 1 and step == 2 else 1
        (UPDATE * spoilt * sum(p.sum() for p in model.parameters())).backward()
        optimizer.step()
    left_out = replica.metrics()["left_out"]
    replica.close()
    assert left_out == (here.rank == 1)
    assert abs(before - mean_of(model) - 4 * UPDATE) < 1e-6
    return left_out


def nobody_lags_further_than_allowed(here: Here) -> float:
    bounded = train(here, Gossip(lag=1), 20, pause_of(here))
    # An exchange takes a slow step, and at most 1 + 1 fast ones: ten slow steps at least for twenty fast ones.
    assert bounded["seconds"] > 8 * SLOW, bounded["seconds"]
    return bounded["seconds"]


def every_update_counts_whatever_is_sent(here: Here) -> dict[str, float]:
    distances = {}
    for algorithm in (
        Gossip(lag=3),
        DecentralizedSGD(lag=2),
        QuantizedGossip(lag=4),
        QuantizedGossip(bits=8, lag=4),
        LowPrecisionDecentralized(lag=4),
        LowPrecisionDecentralized(codec=Quantize(bits=4), lag=4),
        PushSum(topology=RandomPush(), lag=3),
        Gossip(every=2, lag=3),
    ):
        found = train(here, algorithm, 25, pause_of(here, 0.02))
        assert abs(found["moved"] - 25 * UPDATE) < 0.01 * 25 * UPDATE, (algorithm, found["moved"])
        assert found["exchanges"] >= 3, algorithm
        distances[repr(algorithm)] = found["distance"]
    assert all(distance < 0.3 for distance in distances.values()), distances
    return distances


def history_may_lag_too(here: Here) -> None:
    found = train(here, GossipGraD(lag=3, wire="fp32"), 25, pause_of(here, 0.02), momentum=0.5)
    whole = sum((1 - 0.5 ** (step + 1)) / 0.5 for step in range(25)) * UPDATE
    assert abs(found["moved"] - whole) < 0.02 * whole, (found["moved"], whole)


def a_rank_may_have_fewer_steps(here: Here) -> None:
    steps = 30 if here.rank == 0 else 6
    found = train(here, Gossip(lag=2, wire="fp32"), steps, 0.02)
    total = sum(float(t) for t in here.gathered(torch.tensor([steps * UPDATE], dtype=torch.float64))) / here.world
    assert abs(found["moved"] - total) < 0.01 * total, (found["moved"], total)


def closing_loses_nothing(here: Here) -> None:
    """What the last exchange brings is added on all ranks, or the mean would not be kept."""
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, Gossip(lag=50, wire="fp32"))
    before = mean_of(model)
    for _ in range(12):
        optimizer.zero_grad()
        (UPDATE * (here.rank + 1) * sum(p.sum() for p in model.parameters())).backward()
        time.sleep(pause_of(here, 0.02))
        optimizer.step()
    replica.close()
    moved = before - sum(map(float, here.gathered(torch.tensor([mean_of(model)], dtype=torch.float64)))) / here.world
    expected = 12 * UPDATE * (here.world + 1) / 2
    assert abs(moved - expected) < 1e-3 * expected, (moved, expected)


def a_rank_may_end_long_before_the_others(here: Here) -> int:
    """It answers the others meanwhile, for longer than one wait on the network would last without that."""
    spare, torch_groups._SPARE = torch_groups._SPARE, 1.0 - 30.0  # to the timeout, where connections cannot be cut
    try:
        model = model_of(here.rank)
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = here.replicate(model, optimizer, Gossip(lag=2))
    finally:
        torch_groups._SPARE = spare
    for _ in range(2 if here.rank == 0 else 25):
        optimizer.zero_grad()
        model[0].weight.sum().backward()
        time.sleep(0.1)
        optimizer.step()
    replica.close()
    return replica._weights[0].exchanges


def other_waits_need_to_catch_up_first(here: Here) -> None:
    import torch.distributed as dist

    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, Gossip(lag=1))
    for step in range(20):
        optimizer.zero_grad()
        model[0].weight.sum().backward()
        time.sleep(pause_of(here, 0.02))
        optimizer.step()
        if step % 5 == 4:
            replica.catch_up()
            dist.barrier()


def samples_may_travel_beside(here: Here) -> int:
    """A rank that waits for a slower one's samples answers the exchanges for which that one waits."""
    samples = torch.arange(8, dtype=torch.float32).view(8, 1) + 8 * here.rank
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, Gossip(lag=1))
    seen = []
    with RingShuffle(samples, batch_size=1, timeout=30.0, replica=replica) as shuffle:
        for _ in range(here.world):
            for batch in shuffle:
                optimizer.zero_grad()
                model[0].weight.sum().backward()
                time.sleep(pause_of(here, 0.05))
                optimizer.step()
                seen += batch.flatten().int().tolist()
        ahead = replica._weights[0].exchanges - replica.step
    replica.close()
    assert sorted(seen) == list(range(8 * here.world))
    assert not replica.answer(), "it is closed"
    return ahead


def ranks_at_different_steps_load_what_they_saved(here: Here) -> None:
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, Gossip(lag=2))
    for _ in range(4 + 3 * here.rank):
        optimizer.zero_grad()
        model[0].weight.sum().backward()
        optimizer.step()
    state = replica.state_dict()
    replica.load_state_dict(state)
    assert replica.step == 4 + 3 * here.rank


def a_rank_that_fails_is_heard_by_those_that_wait(here: Here) -> None:
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, Gossip(lag=2))
    begin = time.monotonic()
    try:
        for step in range(6 if here.rank < 2 else 20):
            optimizer.zero_grad()
            model[0].weight.sum().backward()
            if here.rank == 2 and step == 10:
                replica._runner.alarm("rank 2: the data are broken")
                raise ValueError("the data are broken")
            optimizer.step()
            time.sleep(0.02)
        with raises(gossamer.GossamerError, "the data are broken"):
            replica.close()
    except ValueError:
        time.sleep(3)  # the others look at the board every second
    assert time.monotonic() - begin < 10


def a_checkpoint_brings_all_ranks_together(here: Here) -> None:
    algorithm = LowPrecisionDecentralized(lag=4)
    model = model_of(here.rank)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = here.replicate(model, optimizer, algorithm)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (UPDATE * (here.rank + 1) * sum(p.sum() for p in model.parameters())).backward()
            time.sleep(pause_of(here, 0.02))
            optimizer.step()

    steps(10)
    state, weights = replica.state_dict(), copy.deepcopy(model.state_dict())
    numbers = here.gathered(torch.tensor([replica._weights[0].exchanges]))
    assert len({int(number) for number in numbers}) == 1, numbers
    steps(10)
    replica.load_state_dict(state)
    model.load_state_dict(weights)
    assert replica._weights[0].exchanges == int(numbers[0])
    before = here.gathered(torch.tensor([mean_of(model)], dtype=torch.float64))
    steps(10)
    with replica.consensus():
        after = mean_of(model)
    moved = sum(map(float, before)) / here.world - after
    expected = 10 * UPDATE * (here.world + 1) / 2
    assert abs(moved - expected) < 0.02 * expected, (moved, expected)


def what_needs_all_ranks_at_one_step_is_refused(here: Here) -> None:
    model = model_of(0)
    optimizer = SGD(model.parameters(), lr=1.0)
    for options, match in (({"scaler": torch.amp.GradScaler("cpu")}, "scaler="), ({"buffers": "broadcast"}, "buffers=")):
        with raises(gossamer.ConfigurationError, match):
            gossamer.replicate(model, optimizer, Gossip(lag=1), timeout=30.0, **options)
    halves = [SGD(layer.parameters(), lr=1.0) for layer in model]
    with raises(gossamer.ConfigurationError, "several optimizers"):
        gossamer.replicate(model, halves, Gossip(lag=1), timeout=30.0)
    replica = here.replicate(model, optimizer, Gossip(lag=1))
    with raises(gossamer.UsageError, "not needed"), replica.join():
        pass
