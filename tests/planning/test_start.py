"""A replica that is to choose: it begins with plain all-reduce, measures, and all ranks go on with the same algorithm."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, ConfigurationError, DisagreementError, Gossip, loopback
from gossamer.algorithms import Algorithm
from gossamer.optim import OneBitAdam
from gossamer.planning import read_plan, start
from gossamer.planning.chooser import LEARNING, WINDOW
from gossamer.planning.profile import STEPS
from gossamer.replica import Replica
from gossamer.replication import replicate_over
from gossamer.simulate import Cluster, Compute, Link, Machines
from gossamer.simulate.clock import Clock
from gossamer.simulate.clocked import ClockedRunner, Wire
from gossamer.simulate.levels import Levels, nodes_of
from gossamer.simulate.processor import Processing
from gossamer.simulate.stand_in import stand_in, take_time
from gossamer.simulate.valueless import Valueless
from gossamer.spelled import algorithm_of

WORLD, BEFORE = 4, LEARNING + STEPS


def small(rank: int, **options: Any) -> tuple[Replica, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = options.pop("optimizer", partial(torch.optim.SGD, lr=0.1))(model.parameters())
    replica = gossamer.replicate(model, optimizer, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    return replica, step


@pytest.mark.parametrize("fidelity", ["exact", "loose"])
def test_all_ranks_go_on_with_the_same_and_a_line_says_why(
    fidelity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.toml"

    def body(rank: int) -> tuple[Algorithm, Algorithm]:
        replica, step = small(rank, fidelity=fidelity, plan=path)
        for _ in range(BEFORE - 1):
            step()
        before = replica.algorithm
        for _ in range(3):
            step()
        return before, replica.algorithm

    with caplog.at_level(logging.INFO, "gossamer"):
        found = loopback(body, WORLD)
    assert {before for before, _ in found} == {AllReduce()}
    assert {after for _, after in found} == {read_plan(path).algorithm}
    lines = [record.message for record in caplog.records if record.message.startswith("plan (")]
    assert len(lines) == 1
    assert read_plan(path).method in lines[0]


def test_a_plan_that_is_there_is_used_from_the_first_step_on(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"

    def body(rank: int) -> Algorithm:
        replica, step = small(rank, fidelity="close", plan=path)
        for _ in range(BEFORE):
            step()
        replica.close()
        again, step = small(rank, plan=path)
        first = again.algorithm
        step()
        again.close()
        return first

    assert set(loopback(body, 2)) == {read_plan(path).algorithm}


def test_a_plan_of_another_world_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"

    def body(rank: int, told: bool) -> None:
        if told:
            with pytest.raises(ConfigurationError, match="made for 2 ranks, and there are 3"):
                small(rank, plan=path)
            return
        _, step = small(rank, plan=path)
        for _ in range(BEFORE):
            step()

    loopback(lambda rank: body(rank, False), 2)
    loopback(lambda rank: body(rank, True), 3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algorithm": Gossip(), "fidelity": "close"}, "not both"),
        ({"fidelity": "closer"}, "'exact', 'close', 'loose'"),
        ({"switch": True}, "give fidelity= or plan="),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        small(0, **options)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"fidelity": "loose"}, "what is asked of the choice"),
        ({"fidelity": "close", "switch": True}, "what is asked of the choice"),
        ({"algorithm": AllReduce()}, "choice"),
    ],
    ids=repr,
)
def test_ranks_that_ask_for_different_things_are_told_so(other: dict[str, Any], told: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(DisagreementError, match=f"(?s){told}.*rank 0: .*rank 1: "):
            small(rank, **(other if rank else {"fidelity": "close"}))

    loopback(body, 2)


def test_an_optimizer_that_communicates_leaves_nothing_to_choose() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ConfigurationError, match="communicates by itself"):
            small(rank, fidelity="close", optimizer=OneBitAdam)

    loopback(body, 2)


def test_one_rank_has_nothing_to_choose() -> None:
    replica, step = small(0, fidelity="loose", switch=True)
    for _ in range(BEFORE + 2):
        step()
    assert replica.algorithm == AllReduce()


def test_a_model_that_is_not_called_cannot_be_timed() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, fidelity="close")
        for _ in range(BEFORE):
            optimizer.zero_grad()
            model[0](torch.ones(1, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(gossamer.GossamerError, match="no forward pass of the model was seen"):
        loopback(body, 2)


class Simulated:
    """Training under a clock of its own, on a line whose rate may change between steps."""

    def __init__(self, mbit: float, fidelity: Any, switch: bool, path: Path | None = None, seconds: float = 0.1) -> None:
        clock, self.link = Clock(), Link(bandwidth=mbit * 1e6, latency=1e-4)
        cluster = Cluster(machines=Machines(count=WORLD), between=self.link)
        self._wire = Wire(clock, Levels(cluster, nodes_of(cluster)), Processing(clock, cluster.processor, 1))
        self.runner = ClockedRunner(clock, self._wire, 2)
        model = nn.Sequential(*(nn.Linear(512, 512, device="meta") for _ in range(6)))
        compute = Compute.uniform(model, forward=0.3 * seconds, backward=0.6 * seconds, optimizer=0.1 * seconds)
        self._twin = stand_in(model, compute, self.runner.compute)
        self._optimizer = torch.optim.SGD(self._twin.parameters(), lr=0.1)
        take_time(self._optimizer, compute.optimizer, self.runner.compute, lambda: None)
        begin = partial(start.begin, wish=start.wished(None, fidelity, path, switch))
        self.replica = replicate_over(self.runner, self._twin, self._optimizer, begin=begin)

    def set_rate(self, mbit: float) -> None:
        for line in self._wire._lines:
            if line.link.bandwidth < float("inf"):
                line.link = Link(bandwidth=mbit * 1e6, latency=line.link.latency)
                line._shared._rate = line.link.goodput

    def step(self) -> float:
        """Seconds that it took."""
        before = self.runner.now()
        with Valueless():  # type: ignore[no-untyped-call]
            self._optimizer.zero_grad()
            self._twin().backward()
            self._optimizer.step()
        return self.runner.now() - before


def test_the_method_follows_when_the_rate_drops() -> None:
    run = Simulated(1000, "loose", switch=True, seconds=0.9)
    for _ in range(BEFORE + 60):
        run.step()
    assert run.replica.algorithm == AllReduce()
    run.set_rate(50)
    for taken in range(50):
        slow = run.step()
        if run.replica.algorithm != AllReduce():
            break
    else:
        pytest.fail("50 steps after the rate dropped it is still all-reduce")
    assert taken < 50
    for _ in range(4):
        fast = run.step()
    assert fast < slow / 1.1
    assert run.replica.step == BEFORE + 60 + taken + 1 + 4


def test_an_unchanged_noisy_line_is_no_reason_to_switch() -> None:
    """2,000 steps at a rate that changes with every step, by a fifth up or down, and now and then is a third."""
    drawn, run = random.Random(0), Simulated(300, "loose", switch=True)
    methods = set()
    for step in range(2000):
        run.set_rate(300 * (1 / 3 if drawn.random() < 0.03 else drawn.uniform(0.8, 1.2)))
        run.step()
        if step >= BEFORE:
            methods.add(run.replica.algorithm)
    assert len(methods) == 1


def test_without_switch_the_first_choice_stays() -> None:
    run = Simulated(1000, "loose", switch=False, seconds=0.9)
    for _ in range(BEFORE + 2):
        run.step()
    run.set_rate(20)
    for _ in range(60):
        run.step()
    assert run.replica.algorithm == AllReduce()


def test_a_plan_has_measured_the_link_and_the_computation(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    run = Simulated(200, "close", switch=False, path=path)
    for _ in range(BEFORE):
        run.step()
    plan = read_plan(path)
    assert run.replica.algorithm == plan.algorithm != AllReduce()
    assert plan.facts.links.ring.goodput == pytest.approx(200e6, rel=0.02)
    assert plan.facts.compute.seconds == pytest.approx(0.1, rel=0.02)
    assert plan.facts.seconds <= 10
    steps = [run.step() for _ in range(8)]
    assert sum(steps) / 8 == pytest.approx(plan.row.step_seconds, rel=0.05)


def test_a_method_that_is_not_faster_than_plain_all_reduce_does_not_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.toml"
    run = Simulated(200, "close", switch=False, path=path)
    plain = [run.step() for _ in range(BEFORE)][-2]
    chosen = run.replica.algorithm
    assert chosen != AllReduce()
    run.set_rate(20)
    with caplog.at_level(logging.INFO, "gossamer"):
        slow = [run.step() for _ in range(LEARNING + WINDOW)]
    assert min(slow) > plain
    assert run.replica.algorithm == read_plan(path).algorithm == AllReduce()
    assert "was predicted to be faster" in read_plan(path).why
    assert f"back to AllReduce() after step {BEFORE + LEARNING + WINDOW}" in caplog.text


def test_a_method_that_is_faster_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    run = Simulated(200, "close", switch=False, path=path)
    for _ in range(BEFORE + 4 * WINDOW):
        run.step()
    assert run.replica.algorithm == read_plan(path).algorithm != AllReduce()


def test_after_a_switch_the_former_method_comes_back_if_it_was_faster() -> None:
    run = Simulated(1000, "loose", switch=True, seconds=0.9)
    for _ in range(BEFORE + 30):
        run.step()
    run.set_rate(50)
    taken = next(number for number in range(50) if run.step() and run.replica.algorithm != AllReduce())
    run.set_rate(2)
    for _ in range(LEARNING + WINDOW):
        assert taken < 50
        run.step()
    assert run.replica.algorithm == AllReduce()


def test_while_another_method_is_predicted_to_be_faster_it_is_tried(tmp_path: Path) -> None:
    """A line that carries one pattern much slower than was measured: the choice goes to what is the fastest in fact."""
    path = tmp_path / "plan.toml"
    run = Simulated(200, "loose", switch=False, path=path)
    for _ in range(BEFORE):
        run.step()
    first = read_plan(path)
    assert first.method != "AllReduce()"
    run.set_rate(90)
    for _ in range(3 * (LEARNING + WINDOW) + 1):
        run.step()
    then = read_plan(path)
    assert run.replica.algorithm == then.algorithm
    taken = then.facts.steps
    assert {"AllReduce()", first.method, then.method} <= set(taken)
    assert len(taken) >= 3
    assert then.row.seconds <= 1.03 * min(row.seconds for row in then.table if str(row) in taken)


def test_a_method_that_exchanges_in_every_fourth_step_alone_is_watched_by_its_mean_step(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    run = Simulated(1000, "loose", switch=False, path=path)
    for _ in range(BEFORE):
        run.step()
    path.write_text(replace(read_plan(path), method="LocalSGD(every=4)").dumps())
    again = Simulated(1000, "loose", switch=True, path=path)
    for _ in range(2 * WINDOW):
        again.step()
    assert again.replica.algorithm == algorithm_of("LocalSGD(every=4)")
    again.set_rate(20)
    for _ in range(50):
        again.step()
    assert again.replica.algorithm != algorithm_of("LocalSGD(every=4)")
