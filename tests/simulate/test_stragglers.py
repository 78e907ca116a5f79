"""Workers whose computation takes different times: closed forms, laws, and beside ranks that each have a clock of their own."""

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gossamer import (
    AllReduce,
    DiLoCo,
    Gossip,
    GossipGraD,
    GossipPGA,
    LocalSGD,
    PowerSGD,
    PushSum,
    ScatterReduce,
    loopback,
)
from gossamer.algorithms import Algorithm, in_parts
from gossamer.comm.loopback import LoopbackRunner, current_runner
from gossamer.comm.ops import Broadcast, Flow, Group, Op, Permute, Push, Start, Wait
from gossamer.comm.runner import Ticket
from gossamer.replicate import replicate_over
from gossamer.simulate import Cluster, Compute, Link, Machines, Pauses, StepTime, Stragglers, step_time
from gossamer.simulate.levels import Levels, nodes_of
from gossamer.simulate.replay import Draw, Workers
from gossamer.simulate.run import Training, run
from gossamer.simulate.window import Window

from ..contracts.cases import plain
from .test_step_time import layers

FREE = Link()
COMPUTE = Compute(forward=0.03, backward=0.07)


def on(world: int, link: Link = FREE, own: dict[int, Link] | None = None, devices: int = 1, **stragglers: Any) -> Cluster:
    machines = Machines(count=world // devices, devices=devices)
    return Cluster(machines=machines, between=link, own=own or {}, stragglers=Stragglers(**stragglers))


def priced(algorithm: Algorithm, cluster: Cluster, *numels: int) -> StepTime:
    return step_time(layers(*(numels or (1000,))), algorithm, cluster=cluster, compute=COMPUTE)


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 8, 128])
def test_a_barrier_among_exponential_times_costs_their_harmonic_number(world: int) -> None:
    found = priced(AllReduce(), on(world, jitter=1.0, distribution="exponential", steps=20_000))
    harmonic = sum(1 / n for n in range(1, world + 1))
    assert found.step_seconds == pytest.approx(0.1 * harmonic, rel=0.01)
    assert found.straggler_seconds == pytest.approx(found.exposed_seconds)


def test_alone_a_worker_takes_its_own_mean() -> None:
    for distribution in ("lognormal", "exponential"):
        found = priced(AllReduce(), on(1, jitter=0.3, distribution=distribution, steps=20_000))
        assert found.step_seconds == pytest.approx(0.1, rel=0.01)


def test_workers_that_are_equal_wait_for_nobody() -> None:
    assert priced(Gossip(), on(8)).straggler_seconds == 0
    assert priced(Gossip(), on(8, slow={3: 1.0})).straggler_seconds == 0


def test_everyone_waits_for_a_slow_machine_sooner_or_later() -> None:
    for algorithm in (AllReduce(), Gossip(), LocalSGD(every=4)):
        assert priced(algorithm, on(8, slow={3: 1.5}, steps=4000)).step_seconds == pytest.approx(0.15, rel=0.01)


def test_pauses_cost_a_barrier_each_of_them_and_one_worker_only_its_own() -> None:
    """2 % of steps: alone that many pauses, and a barrier one where any of 16 pauses."""
    pauses = Pauses(every=5.0, seconds=0.5)
    alone = priced(AllReduce(), on(1, pauses=pauses, steps=20_000)).straggler_seconds
    assert alone == pytest.approx(0.02 * 0.5, rel=0.1)
    together = priced(AllReduce(), on(16, pauses=pauses, steps=20_000)).straggler_seconds
    assert together == pytest.approx(0.5 * (1 - np.exp(-16 * 0.02)), rel=0.05)
    assert priced(Gossip(lag=8), on(16, pauses=pauses)).straggler_seconds < together / 2


def test_gossip_hides_a_jitter_that_a_barrier_does_not() -> None:
    """The main point of GossipGraD (Daily et al. 2018, arXiv 1803.05880), on as many workers as theirs."""
    link = Link(bandwidth=56e9, latency=5e-6)
    gossip, exact = (
        priced(algorithm, on(128, link, jitter=0.05), *[6_400_000] * 4) for algorithm in (GossipGraD(), AllReduce())
    )
    assert gossip.compute_seconds / gossip.step_seconds >= 0.97
    assert exact.compute_seconds / exact.step_seconds <= 0.93


def test_the_same_seed_draws_the_same() -> None:
    first, again, other = (priced(AllReduce(), on(4, jitter=0.1, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


# -- many workers -----------------------------------------------------------------------------------------------------


def gossip(world: int, steps: int) -> None:
    priced(Gossip(), on(world, Link(bandwidth=1e10, latency=5e-5), jitter=0.05, steps=steps))


def calls(world: int, steps: int) -> int:
    """How many functions of Python, and of what it calls, a prediction takes."""
    number = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        gossip(world, steps)
    finally:
        sys.setprofile(None)
    return number


def test_a_step_of_a_replay_does_not_look_at_each_worker() -> None:
    """150 more steps of 20,000 workers; a look at each of them would be three million calls."""
    gossip(20_000, 50)
    assert calls(20_000, 200) - calls(20_000, 50) < 150 * 200


def test_memory_of_a_replay_grows_with_workers_and_not_with_steps() -> None:
    gossip(16, 50)
    peaks = []
    for steps in (50, 200):
        tracemalloc.start()
        gossip(20_000, steps)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[0] < 20_000 * 10_000


# -- links of single machines -----------------------------------------------------------------------------------------


def test_a_slow_link_holds_up_a_collective_and_the_partners_of_a_gossip() -> None:
    fast, slow = Link(bandwidth=1e9), Link(bandwidth=1e8)
    everyone, one = (priced(AllReduce(), on(4, slow, own=own), 10**6) for own in ({}, {}))
    one = priced(AllReduce(), on(4, fast, own={2: slow}), 10**6)
    assert one.step_seconds == pytest.approx(everyone.step_seconds, rel=1e-6)
    gossip = priced(Gossip(), on(4, fast, own={2: slow}), 10**6)
    assert priced(Gossip(), on(4, fast), 10**6).step_seconds < gossip.step_seconds
    assert gossip.step_seconds <= priced(Gossip(), on(4, slow), 10**6).step_seconds * (1 + 1e-9)


# -- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*plain(), in_parts(3, Gossip()), Gossip(lag=2), DiLoCo(every=2, lag=2)], ids=repr)
def test_equal_workers_take_what_was_recorded(algorithm: Algorithm) -> None:
    """A slow line, so that what is waited for counts."""
    cluster = on(8, Link(bandwidth=2e8, latency=1e-3), devices=2)
    found, program = run(training(algorithm), cluster, Levels(cluster, nodes_of(cluster)))
    workers, cycles = Workers(program, 8), 3
    moments = [0.0]
    for _ in range(cycles):
        for _ in program:
            workers.take(Draw(np.ones(8)))
        moments.append(float(workers.now[0]))
    if algorithm.cadence.lag == 0:
        assert workers.now == pytest.approx(workers.now[0], rel=1e-9)
        assert (moments[-1] - moments[-2]) / len(program) == pytest.approx(found.seconds, rel=1e-6)


# -- beside ranks that each have a clock ------------------------------------------------------------------------------

WIDTHS = 6, 5, 4, 3
TIMES = {"0": (0.01, 0.02), "1": (0.02, 0.01), "2": (0.005, 0.03)}
OPTIMIZER = 0.004
LATENCY = 0.003


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))


def training(algorithm: Algorithm) -> Training:
    momentum = 0.9 if algorithm.traits.takes_momentum else 0.0
    return Training(
        model=model(),
        algorithm=algorithm,
        make_optimizer=partial(SGD, lr=0.1, momentum=momentum),
        compute=Compute.layered(model(), TIMES, optimizer=OPTIMIZER),
        lanes=2,
        buffers=None,
        overlap_forward=False,
        without=(),
        warmup=2,
        steps=8,
    )


class Timed(LoopbackRunner):
    """A rank of a loopback run with a clock of its own, moved by hand; what an operation waits for, it waits for."""

    def __init__(self, inner: LoopbackRunner, began: dict[Any, dict[int, float]]) -> None:
        vars(self).update(vars(inner))
        self.lanes = 2
        self.moment = 0.0
        self._began = began
        self._free: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._counts: dict[Group, int] = {}

    def submit(self, make_flow: Callable[[], Flow[Any]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[Any]:
        self._flow = max(self.moment, self._free.get(lane, 0.0))
        ticket = super().submit(lambda: self._timed(make_flow()), label, lane)
        self._free[lane] = self._ends[ticket.sequence] = self._flow
        return ticket

    def wait(self, ticket: Ticket[Any], meanwhile: Callable[[], bool] | None = None) -> Any:
        self.moment = max(self.moment, self._ends[ticket.sequence])
        return super().wait(ticket, meanwhile)

    def _timed(self, flow: Flow[Any]) -> Flow[Any]:
        reply: Any = None
        started: dict[int, tuple[Any, Op, Group]] = {}
        while True:
            try:
                command = flow.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(command, Start):
                group = tuple(range(self.world)) if command.group is None else command.group
                self._counts[group] = self._counts.get(group, 0) + 1
                place = group, self._counts[group]
                self._began.setdefault(place, {})[self.rank] = self._flow
            reply = yield command
            if isinstance(command, Start):
                started[id(reply)] = place, command.op, group
            if isinstance(command, Wait):
                place, op, group = started[id(command.handle)]
                if op.tensor.numel():
                    waited = max(
                        self._began[place][group[member]] for member in awaited(op, group.index(self.rank), len(group))
                    )
                    self._flow = max(self._flow, waited + LATENCY * op.traffic(len(group)).rounds)


def awaited(op: Op, member: int, world: int) -> set[int]:
    """The members whose beginning a member waits for."""
    if isinstance(op, Permute):
        return {member, op.permutation.source(member), op.permutation.destination(member)}
    if isinstance(op, Push):
        return {member, *op.graph.sources(member), *op.graph.destinations(member)}
    return {member, op.source} if isinstance(op, Broadcast) else set(range(world))


def moments(algorithm: Algorithm, factors: np.ndarray, first: int) -> np.ndarray:
    """When each rank ends each step after the ``first`` ones, in which all are equal: ``(steps, world)``."""
    began: dict[Any, dict[int, float]] = {}

    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        inner, mine = current_runner(), model()
        assert inner is not None
        runner = Timed(inner, began)
        optimizer = training(algorithm).make_optimizer(mine.parameters())
        factor = 1.0

        def take(seconds: float) -> None:
            runner.moment += factor * seconds

        optimizer.register_step_post_hook(lambda *_: take(OPTIMIZER))
        replica = replicate_over(runner, mine, optimizer, algorithm)
        ends = []
        for each in [*np.ones((first, len(factors[0]))), *factors]:
            factor = each[rank]
            optimizer.zero_grad()
            x: Tensor = torch.ones(2, WIDTHS[0], requires_grad=True)
            for name, layer in mine.named_children():
                take(TIMES[name][0])
                x = layer(x)
                x.register_hook(partial(lambda seconds, _: take(seconds), TIMES[name][1]))
            x.square().sum().backward()
            optimizer.step()
            ends.append(runner.moment)
        replica.close()
        return ends

    return np.array(loopback(body, factors.shape[1])).T[first:]


METHODS = [
    AllReduce(), AllReduce(bucket_bytes=60), ScatterReduce(bucket_bytes=60), Gossip(), Gossip(bucket_bytes=60), GossipGraD(),
    GossipPGA(period=4), PushSum(), LocalSGD(every=3), DiLoCo(every=3), PowerSGD(), in_parts(2, Gossip()),
    Gossip(every=2),
]  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_every_worker_ends_its_steps_when_a_rank_with_a_clock_does(algorithm: Algorithm, world: int) -> None:
    cluster = on(world, Link(latency=LATENCY))
    nodes = nodes_of(cluster)
    _, program = run(training(algorithm), cluster, Levels(cluster, nodes))
    window = Window.of(algorithm, world, world, 2, 8, False)
    cycles = 1 if isinstance(algorithm, GossipGraD) else 2  # whose partners are drawn at random
    factors = np.exp(0.3 * np.random.default_rng(world).standard_normal((cycles * len(program), world)))
    beside = moments(algorithm, factors, window.warmup)
    workers, found = Workers(program, world), []
    for factor in factors:
        workers.take(Draw(factor))
        found.append(workers.now)
    offset = beside[0] - found[0]
    assert offset == pytest.approx(offset[0], abs=1e-9), "all begin together"
    assert np.array(found) + offset[0] == pytest.approx(beside, abs=1e-9)
