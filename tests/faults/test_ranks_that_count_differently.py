"""Ranks that took another number of steps, or made other calls: the late ones take part in what is missing, and where that
cannot be, the error says who did what. What needs real processes stands in ``processes/scenarios_counts.py``."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from faults.training import Ramp, batch, mlp, outcome, sgd, squares, vector
from gossamer import (
    AllReduce,
    DiLoCo,
    Gossip,
    GossipPGA,
    LocalSGD,
    PushSum,
    QuantizedGossip,
    Replica,
    ScatterReduce,
    after,
    loopback,
)
from gossamer.algorithms import Algorithm

STEPS = 10


def short(algorithm: Algorithm) -> str:
    return f"{algorithm!r:.40}"


# -- one step fewer -------------------------------------------------------------------------------------------------------

SKIPPED: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one in the middle": ((), (4,)),
    "the first": ((), (0,)),
    "the last": ((), (STEPS - 1,)),
    "two of rank 0": ((2, 5), ()),
    "three running": ((), (3, 4, 5)),
    "another one on each": ((2,), (6,)),
}
"""The batches that rank 0 and rank 1 leave out."""

KEEP_THE_MEAN = [Gossip(wire="fp32"), PushSum(), LocalSGD(every=1), GossipPGA(period=3, wire="fp32")]
OTHERS = [LocalSGD(every=3), QuantizedGossip(), DiLoCo(every=2), DiLoCo(every=3)]

Ending = Callable[[Replica], None]


def at_consensus(replica: Replica) -> None:
    with replica.consensus():
        pass
    replica.close(average=True)


def at_distance(replica: Replica) -> None:
    assert replica.consensus_distance() >= 0
    replica.close(average=True)


def at_state(replica: Replica) -> None:
    replica.load_state_dict(replica.state_dict())
    replica.close(average=True)


ENDINGS: dict[str, Ending] = {
    "close(average=True)": lambda replica: replica.close(average=True),
    "consensus()": at_consensus,
    "consensus_distance()": at_distance,
    "state_dict()": at_state,
}


def slopes(rank: int) -> Tensor:
    return torch.arange(8, dtype=torch.float64) * (1 if rank == 0 else -3) + 1


def trained(algorithm: Algorithm, skipped: str, ending: Ending, rank: int) -> Tensor:
    model = Ramp()
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(STEPS):
        if step in SKIPPED[skipped][rank]:
            continue
        optimizer.zero_grad()
        model(slopes(rank)).backward()
        optimizer.step()
    ending(replica)
    return vector(model)


def taken(skipped: str) -> list[int]:
    """How many steps each rank took."""
    return [STEPS - len(left_out) for left_out in SKIPPED[skipped]]


UNEVEN = [name for name in SKIPPED if name != "another one on each"]


@pytest.mark.parametrize("skipped", list(SKIPPED))
@pytest.mark.parametrize("algorithm", KEEP_THE_MEAN, ids=short)
def test_the_average_has_every_update_that_any_rank_made(algorithm: Algorithm, skipped: str) -> None:
    right = -sum(count * slopes(rank) for rank, count in enumerate(taken(skipped))) / 2
    for values in loopback(lambda rank: trained(algorithm, skipped, ENDINGS["close(average=True)"], rank), 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ending", list(ENDINGS))
@pytest.mark.parametrize("algorithm", [Gossip(wire="fp32"), LocalSGD(every=1), GossipPGA(period=3)], ids=short)
def test_every_collective_call_brings_the_ranks_together(algorithm: Algorithm, ending: str) -> None:
    first, second = loopback(lambda rank: trained(algorithm, "one in the middle", ENDINGS[ending], rank), 2)
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("ending", list(ENDINGS))
@pytest.mark.parametrize("skipped", ["one in the middle", "the last", "three running"])
def test_so_they_are_where_a_dense_start_is_over(skipped: str, ending: str) -> None:
    right = -sum(count * slopes(rank) for rank, count in enumerate(taken(skipped))) / 2
    algorithm = LocalSGD(every=3, dense=2)
    for values in loopback(lambda rank: trained(algorithm, skipped, ENDINGS[ending], rank), 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


CHANGES = {
    "behind it": after(2, after(6, LocalSGD(every=2), before=LocalSGD(every=1))),
    "before it": after(2, after(10, LocalSGD(every=2), before=LocalSGD(every=1))),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_ranks_that_were_brought_together_take_the_next_change_at_once(change: str) -> None:
    """After a dense start; one rank has had half as many passes as the other when both ask for the average."""

    def train(rank: int) -> Tensor:
        model = Ramp()
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, CHANGES[change])
        for passes in (8 - 4 * rank, 6):
            for _ in range(passes):
                optimizer.zero_grad()
                model(slopes(rank)).backward()
                optimizer.step()
            with replica.consensus():
                pass
        replica.close(average=True)
        return vector(model)

    right = -(14 * slopes(0) + 10 * slopes(1)) / 2
    for values in loopback(train, 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


COMBINED = {f"{short(algorithm)}, {skipped}": (algorithm, skipped) for algorithm in OTHERS for skipped in UNEVEN}


@pytest.mark.parametrize("combined", list(COMBINED))
def test_replicas_end_equal_under_other_weight_algorithms(combined: str) -> None:
    algorithm, skipped = COMBINED[combined]
    first, second = loopback(lambda rank: trained(algorithm, skipped, ENDINGS["close(average=True)"], rank), 2)
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.parametrize("skipped", UNEVEN)
def test_it_is_said_who_took_how_many_steps(skipped: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        loopback(lambda rank: trained(Gossip(wire="fp32"), skipped, ENDINGS["close(average=True)"], rank), 2)
    said = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert any(all(f"rank {rank}" in text and str(count) in text for rank, count in enumerate(taken(skipped))) for text in said)


def test_nothing_is_said_where_all_took_as_many(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        loopback(lambda rank: trained(Gossip(wire="fp32"), "another one on each", ENDINGS["consensus()"], rank), 2)
    assert not caplog.records


@pytest.mark.parametrize("algorithm", [Gossip(wire="fp32"), LocalSGD(every=1)], ids=short)
def test_a_replica_that_took_a_step_fewer_closes_alone(algorithm: Algorithm) -> None:
    """Without an average every rank keeps its own weights, and nobody is left waiting."""
    for values in loopback(lambda rank: trained(algorithm, "one in the middle", lambda replica: replica.close(), rank), 2):
        assert values.isfinite().all()


def test_training_goes_on_after_the_ranks_were_brought_together() -> None:
    """At each evaluation the one that is behind catches up; both then train on, and meet as before."""

    def train(rank: int) -> Tensor:
        model = Ramp()
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        for step in range(12):
            if not (rank == 1 and step in (2, 7)):
                optimizer.zero_grad()
                model(slopes(rank)).backward()
                optimizer.step()
            if step % 4 == 3:
                with replica.consensus():
                    pass
        replica.close(average=True)
        return vector(model)

    right = -(12 * slopes(0) + 10 * slopes(1)) / 2
    for values in loopback(train, 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


def scaled(algorithm: Algorithm, rank: int) -> tuple[Tensor, float]:
    """With a scaler that ``replicate()`` was not told of; one batch of rank 1 overflows."""
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(rank, step)
        if rank == 1 and step == 3:
            x[0, 0] = float("inf")
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    replica.close(average=True)
    return vector(model), scaler.get_scale()


@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0)], ids=short)
def test_an_overflow_travels_in_the_gradients(algorithm: Algorithm) -> None:
    (first, scale), (second, other) = loopback(lambda rank: scaled(algorithm, rank), 2)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert scale == other == 2.0**9


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=1), PushSum()], ids=short)
def test_an_overflow_on_one_rank_is_a_step_fewer_where_weights_travel(algorithm: Algorithm) -> None:
    (first, _), (second, _) = loopback(lambda rank: scaled(algorithm, rank), 2)
    assert torch.equal(first, second)
    assert first.isfinite().all()


# -- collective calls made on one rank alone ------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Replica], Any]] = {
    "consensus()": lambda replica: replica.consensus().__enter__(),
    "consensus_distance()": lambda replica: replica.consensus_distance(),
    "state_dict()": lambda replica: replica.state_dict(),
    "load_state_dict()": lambda replica: replica.load_state_dict({}),
    "close(average=True)": lambda replica: replica.close(average=True),
    "join()": lambda replica: replica.join().__enter__(),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        squares(model, rank, step).backward()
        optimizer.step()


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0), Gossip()], ids=short)
def test_a_collective_call_on_one_rank_alone_is_an_error_that_names_it(algorithm: Algorithm, call: str, caller: int) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        steps(model, optimizer, rank, range(3))
        if rank == caller:
            CALLS[call](replica)
        steps(model, optimizer, rank, range(3, 6))
        replica.close()
        return vector(model)

    _, error = outcome(train)
    assert error is not None
    assert call in str(error)
    assert f"rank {caller}" in str(error)


@pytest.mark.parametrize("call", ["state_dict()", "load_state_dict()"])
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=short)
def test_a_collective_call_on_one_rank_alone_inside_join_is_an_error_that_names_it(algorithm: Algorithm, call: str) -> None:
    """Rank 1 has fewer batches, and goes on answering."""

    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        with replica.join():
            steps(model, optimizer, rank, range(2 if rank else 4))
            if rank == 0:
                CALLS[call](replica)
        return vector(model)

    _, error = outcome(train)
    assert error is not None
    assert f"rank 0 waits in {call}, but rank 1" in str(error)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=short)
def test_join_inside_join_is_refused(algorithm: Algorithm) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        replica = gossamer.replicate(model, sgd(model), algorithm)
        with replica.join(), replica.join():
            pass
        return vector(model)

    _, error = outcome(train)
    assert error is not None
    assert "join() inside join()" in str(error)


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("pair", [("consensus()", "state_dict()"), ("state_dict()", "consensus_distance()")], ids=str)
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=short)
def test_ranks_in_different_calls_are_told_which(algorithm: Algorithm, pair: tuple[str, str], caller: int) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        steps(model, optimizer, rank, range(3))
        CALLS[pair[rank == caller]](replica)
        return vector(model)

    _, error = outcome(train)
    assert error is not None
    assert all(f"rank {rank}" in str(error) and pair[rank == caller] in str(error) for rank in (0, 1))


@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0), Gossip()], ids=short)
def test_calls_that_are_not_collective_may_be_made_on_one_rank(algorithm: Algorithm) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        steps(model, optimizer, rank, range(3))
        if rank == 1:
            replica.metrics()
            replica.wait_for_exchanges()
            model.state_dict()
            with replica.no_sync(), torch.no_grad():
                squares(model, rank, 7)
        steps(model, optimizer, rank, range(3, 6))
        replica.close(average=True)
        return vector(model)

    first, second = loopback(train, 2)
    assert torch.equal(first, second)


# -- a forward pass on one rank alone -------------------------------------------------------------------------------------


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def forward_alone(training: bool, rank: int, caller: int) -> Tensor:
    model = with_norm()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer)
    steps(model, optimizer, rank, range(3))
    if rank == caller:
        model.train(training)
        with torch.no_grad():
            squares(model, rank, 7)
        model.train()
    steps(model, optimizer, rank, range(3, 6))
    replica.close(average=True)
    return vector(model)


@pytest.mark.parametrize("caller", [0, 1])
def test_a_forward_pass_in_training_mode_on_one_rank_alone_waits_for_nobody(caller: int) -> None:
    first, second = loopback(lambda rank: forward_alone(True, rank, caller), 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("caller", [0, 1])
def test_a_forward_pass_in_evaluation_mode_on_one_rank_alone_works(caller: int) -> None:
    first, second = loopback(lambda rank: forward_alone(False, rank, caller), 2)
    assert torch.equal(first, second)
